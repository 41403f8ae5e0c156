"""Where two trainings part, and whether the promises hold on a task: what a step computes is recorded, and compared."""
