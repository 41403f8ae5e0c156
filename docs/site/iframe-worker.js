/* A page that is opened from a disk may start no worker: the search then runs in a hidden frame. */
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inner = frame.contentWindow
      inner.document.open()
      inner.document.close()
      const load = source => new Promise((resolve, reject) => {
        const script = inner.document.createElement("script")
        Object.assign(script, { src: source, onload: resolve, onerror: reject })
        inner.document.body.append(script)
      })
      inner.importScripts = (...sources) => sources.reduce((before, source) => before.then(() => load(source)),
        Promise.resolve())
      inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.ready = load(url)
      this.inner = inner
    }

    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() { this.inner.frameElement.remove() }
  }
