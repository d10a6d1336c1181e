//! The pods that wait in a replay: one line per kind of pod, the oldest in front.
//!
//! Pods of one kind fit or do not fit together, so only the fronts need to be tried.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::sim::trace::read::TracePod;

/// Waiting arrivals, in lines of equal pods.
pub(crate) struct Queue {
    /// The line of each pod of the trace.
    line_of: Vec<usize>,
    lines: BTreeMap<usize, VecDeque<usize>>,
}

impl Queue {
    /// An empty queue for the pods of a trace.
    pub(crate) fn new(pods: &[TracePod]) -> Self {
        let mut kinds = BTreeMap::new();
        let line_of = pods.iter().map(|pod| {
            let TracePod { cpu_milli, memory_mib, num_gpu, gpu_milli, gpu_spec, .. } = pod;
            let models: BTreeSet<&str> = gpu_spec.iter().map(String::as_str).collect();
            let next = kinds.len();
            *kinds.entry((cpu_milli, memory_mib, num_gpu, gpu_milli, models)).or_insert(next)
        });
        Self { line_of: line_of.collect(), lines: BTreeMap::new() }
    }

    /// Whether an equal pod waits, so that this one does not fit either.
    pub(crate) fn has_equal(&self, pod: usize) -> bool {
        self.lines.contains_key(&self.line_of[pod])
    }

    /// Lets an arrival wait behind all that came before.
    pub(crate) fn join(&mut self, arrival: usize, pod: usize) {
        self.lines.entry(self.line_of[pod]).or_default().push_back(arrival);
    }

    /// The oldest arrival of each line, with the line; the oldest of all first.
    pub(crate) fn fronts(&self) -> BTreeSet<(usize, usize)> {
        let front = |(line, waiting): (&usize, &VecDeque<usize>)| Some((*waiting.front()?, *line));
        self.lines.iter().filter_map(front).collect()
    }

    /// Removes the front of a line, and returns the next one.
    pub(crate) fn leave(&mut self, line: usize) -> Option<usize> {
        let waiting = self.lines.get_mut(&line)?;
        waiting.pop_front();
        let next = waiting.front().copied();
        if next.is_none() {
            self.lines.remove(&line);
        }
        next
    }

    /// All that wait, in no particular order.
    pub(crate) fn all(&self) -> impl Iterator<Item = usize> {
        self.lines.values().flatten().copied()
    }
}
