"""Where two trainings part: what a step computes is recorded by digests, and two records are compared."""
