"use strict";
// Controls the bokeh charts: smoothing, axes, marks, shared cursor, colours. Names are in the page, numbers in bokeh.
(() => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const one = id => document.getElementById(id);
  const written = value => (value === undefined ? "–" : writtenTo(value, Number.isInteger(value) ? 15 : 5, 1e15));
  const writtenTo = (value, digits, most) => {
    const rounded = +value.toPrecision(digits), size = Math.abs(rounded);
    const isLong = size > 0 && (size < 1e-4 || size >= most);
    return isLong ? rounded.toExponential().replace("+", "") : rounded.toLocaleString("en", { maximumSignificantDigits: digits });
  };

  function start(doc) {
    const model = name => doc.get_model_by_name(name);
    const make = (kind, properties) => new (Bokeh.Models.get(kind))(properties);
    const steps = model("steps");
    const allSteps = [steps.start, steps.end];
    const state = { smoothing: 0, logY: false, logX: false, hidden: new Set() };
    const charts = all("figure[data-chart]").map(element => {
      const key = element.dataset.chart;
      const plot = model(`chart-${key}`);
      const axis = plot.left[0];
      const lines = all("[data-line]", element).map(entry => {
        const of = name => model(`${name}-${entry.dataset.line}`);
        const line = of("line");
        return {
          entry, line, odd: of("odd"), dots: of("dots"), smooth: of("smooth"), base: (of("mean") || line).data_source.data,
          run: entry.dataset.run, colour: entry.dataset.colour, last: entry.textContent,
        };
      });
      axis.formatter.doFormat = ticks => ticks.map(tick => writtenTo(tick, 9, 1e6));
      return { element, plot, axis, lines, cursor: model(`cursor-${key}`), isLog: false, ticker: axis.ticker, formatter: axis.formatter };
    });
    const marks = all("[data-marks]").map(box => ({
      box, drawn: charts.flatMap(({ plot }) => plot.renderers.filter(each => (each.name || "").startsWith(`mark-${box.dataset.marks}-`))),
    }));

    // ------------------------------------------------------------------ visible curves

    const isShown = line => !state.hidden.has(line.run);

    function fit(chart) {
      let low = Infinity, high = -Infinity, least = Infinity;
      for (const line of chart.lines.filter(isShown)) {
        const { x, y } = line.line.data_source.data;
        for (let i = 0; i < x.length; i++) {
          if (x[i] < steps.start || x[i] > steps.end || !Number.isFinite(y[i])) continue;
          low = Math.min(low, y[i]);
          high = Math.max(high, y[i]);
          if (y[i] > 0) least = Math.min(least, y[i]);
        }
      }
      scale(chart, state.logY && Number.isFinite(least));
      if (!Number.isFinite(low)) return;
      if (chart.isLog) {
        const margin = (high / least) ** 0.06 || 1.1;
        chart.plot.y_range.setv({ start: least / Math.max(margin, 1.02), end: high * Math.max(margin, 1.02) });
      } else {
        const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 0.5;
        chart.plot.y_range.setv({ start: low - margin, end: high + margin });
      }
    }

    function scale(chart, isLog) {
      if (chart.isLog === isLog) return;
      chart.isLog = isLog;
      chart.plot.y_scale = make(isLog ? "LogScale" : "LinearScale", {});
      const ticker = isLog ? make("LogTicker", { num_minor_ticks: 0, desired_num_ticks: 5 }) : chart.ticker;
      chart.axis.setv({ ticker, formatter: isLog ? make("LogTickFormatter", { ticker }) : chart.formatter });
    }

    function scaleSteps() {
      for (const { plot } of charts) plot.x_scale = make(state.logX ? "LogScale" : "LinearScale", {});
      showAll();
    }

    function showAll() {
      steps.setv({ start: state.logX ? Math.max(allSteps[0], 1) : allSteps[0], end: Math.max(allSteps[1], state.logX ? 2 : -Infinity) });
    }

    function smooth() {
      const reach = (state.smoothing / 100) ** 2 * 0.2 * (allSteps[1] - allSteps[0]);
      one("smoothing-value").textContent = reach ? `± ${written(Math.max(1, Math.round(reach)))}` : "off";
      for (const { lines } of charts) {
        for (const line of lines) {
          line.smooth.data_source.data = reach ? smoothed(line.base, reach) : { x: [], y: [] };
          line.line.glyph.line_alpha = reach ? 0.22 : 1;
          if (line.dots) line.dots.glyph.fill_alpha = reach ? 0.35 : 1;
        }
      }
    }

    // Each value's weight falls with its distance in steps, to 1/e at the reach. So rare and frequent values are
    // smoothed over the same number of steps. A forward and a backward pass avoid a shift to the right.
    function smoothed({ x, y }, reach) {
      const sum = new Float64Array(x.length), weight = new Float64Array(x.length);
      for (const [begin, by] of [[0, 1], [x.length - 1, -1]]) {
        let s = 0, w = 0, before = x[begin];
        for (let i = begin; i >= 0 && i < x.length; i += by) {
          const fade = Math.exp(-Math.abs(x[i] - before) / reach);
          before = x[i];
          s *= fade;
          w *= fade;
          sum[i] += s;
          weight[i] += w;
          if (Number.isFinite(y[i])) {
            s += y[i];
            w += 1;
          }
        }
      }
      const mean = Float64Array.from(x, (_, i) => {
        const isFinite = Number.isFinite(y[i]);
        const total = weight[i] + isFinite;
        return total > 1e-9 ? (sum[i] + (isFinite ? y[i] : 0)) / total : NaN;
      });
      return { x: Float64Array.from(x), y: mean };
    }

    function showRuns() {
      for (const chart of charts) {
        for (const line of chart.lines) {
          const shown = isShown(line);
          for (const each of [line.line, line.smooth, line.odd, line.dots]) if (each) each.visible = shown;
          line.entry.closest("tr, li").classList.toggle("hidden", !shown);
        }
        fit(chart);
      }
      showMarks();
    }

    function showMarks() {
      for (const { box, drawn } of marks)
        for (const each of drawn) each.visible = box.checked && !state.hidden.has(each.name.split("-").pop());
    }

    // ------------------------------------------------------------------ the shared cursor

    const inSight = new Set();
    const sight = new IntersectionObserver(entries => {
      for (const { target, isIntersecting } of entries) inSight[isIntersecting ? "add" : "delete"](target);
    });
    let wanted = null, position = null, isDue = false;

    function point(step) {
      wanted = step;
      if (!isDue) requestAnimationFrame(move);
      isDue = true;
    }

    function move() {
      isDue = false;
      position = wanted;
      one("position").textContent = position === null ? "" : `step ${written(Math.round(position))}`;
      for (const chart of charts) {
        if (position !== null && !inSight.has(chart.element)) continue;
        chart.cursor.setv(position === null ? { visible: false } : { visible: true, location: position });
        for (const line of chart.lines) {
          const { x, y } = line.line.data_source.data;
          line.entry.textContent = position === null || !x.length ? line.last : written(y[nearest(x, position)]);
        }
      }
    }

    function nearest(x, step) {
      let low = 0, high = x.length - 1;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (x[middle] < step) low = middle + 1;
        else high = middle;
      }
      return low > 0 && step - x[low - 1] <= x[low] - step ? low - 1 : low;
    }

    function moveCursor(chart, by) {
      const line = chart.lines.find(isShown);
      if (!line) return;
      const { x } = line.line.data_source.data;
      const at = wanted === null ? (by > 0 ? -1 : x.length) : nearest(x, wanted); // Two key events may come in one frame.
      let next = at + by;
      while (x[next] === x[at] && next > 0 && next < x.length - 1) next += by;
      point(x[Math.min(Math.max(next, 0), x.length - 1)]);
    }

    // ------------------------------------------------------------------ colours

    const isDark = matchMedia("(prefers-color-scheme: dark)");

    function paint() {
      if (!matchMedia("screen").matches) return; // A canvas cannot be redrawn in time for printing.
      document.documentElement.dataset.painted = isDark.matches ? "dark" : "light";
      const style = getComputedStyle(document.documentElement);
      const of = name => style.getPropertyValue(`--${name}`).trim();
      const [line, quiet, text, bad] = ["line", "quiet", "text", "bad"].map(of);
      for (const { plot, lines, cursor } of charts) {
        for (const axis of [...plot.below, ...plot.left])
          axis.setv({ axis_line_color: line, major_tick_line_color: line, major_label_text_color: quiet });
        for (const grid of plot.center.filter(each => "grid_line_color" in each)) grid.grid_line_color = line;
        cursor.line_color = quiet;
        for (const each of lines) {
          each.line.glyph.line_color = each.smooth.glyph.line_color = of(`c${each.colour}`);
          if (each.dots) each.dots.glyph.fill_color = of(`c${each.colour}`);
          if (each.odd) each.odd.glyph.line_color = bad;
        }
      }
      const several = all("[data-shows]").length > 1;
      for (const { box, drawn } of marks)
        for (const each of drawn) {
          const run = Number(each.name.split("-").pop());
          const colour = several ? of(`c${run % 8}`) : box.dataset.marks === "restarts" ? text : quiet;
          each.glyph.setv({ line_color: colour, line_alpha: box.dataset.marks === "epochs" ? 0.35 : 0.7 });
        }
    }

    // ------------------------------------------------------------------ events

    const on = (element, event, act) => element && element.addEventListener(event, act);
    on(one("smoothing"), "input", event => { state.smoothing = event.target.valueAsNumber; smooth(); });
    on(one("log-y"), "change", event => { state.logY = event.target.checked; charts.forEach(fit); });
    on(one("log-x"), "change", event => { state.logX = event.target.checked; scaleSteps(); });
    on(one("reset"), "click", showAll);
    for (const { box } of marks) on(box, "change", showMarks);
    for (const box of all("[data-shows]"))
      on(box, "change", () => { state.hidden[box.checked ? "delete" : "add"](box.dataset.shows); showRuns(); });
    for (const chart of charts) {
      sight.observe(chart.element);
      chart.plot.on_event("mousemove", event => point(event.x));
      chart.plot.on_event("tap", event => point(event.x));
      chart.plot.on_event("mouseleave", () => point(null));
      chart.plot.on_event("doubletap", showAll);
      on(chart.element, "keydown", event => {
        if (event.key === "ArrowLeft" || event.key === "ArrowRight") moveCursor(chart, event.key === "ArrowLeft" ? -1 : 1);
        else if (event.key === "Escape") point(null);
        else return;
        event.preventDefault();
      });
      if (matchMedia("(pointer: coarse)").matches) chart.plot.toolbar.active_drag = null; // Touch scrolls the page.
    }
    let isFitDue = false;
    steps.change.connect(() => {
      if (!isFitDue) requestAnimationFrame(fitAll); // after the tool, which resets the other axis
      isFitDue = true;
    });
    const fitAll = () => {
      isFitDue = false;
      charts.forEach(fit);
      one("reset").disabled = !state.logX && steps.start === allSteps[0] && steps.end === allSteps[1];
    };
    on(isDark, "change", paint);
    paint();
    showRuns();
    const markReady = () => { document.documentElement.dataset.ready = "yes"; };
    if (doc.is_idle) markReady();
    else doc.idle.connect(markReady);
  }

  const wait = () => (Bokeh.documents.length ? start(Bokeh.documents[0]) : setTimeout(wait, 20));
  wait();
})();
