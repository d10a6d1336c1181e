//! The pods that wait in a replay: one line per kind of pod, the oldest in front.
//!
//! Pods of one kind fit or do not fit together, so only the fronts need to be tried: as the extender
//! requeues, those of the highest priority first, then the oldest.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::trace::read::TracePod;
use engine::model::request::GpuRequest;

/// A front of a line: higher priority first, then the older arrival. Last the line itself.
pub(crate) type Front = (Reverse<i32>, usize, usize);

/// Waiting arrivals, in lines of equal pods.
pub(crate) struct WaitingLines {
    /// The line of each pod of the trace.
    line_of: Vec<usize>,
    /// The priority of the pods of each line.
    priorities: Vec<i32>,
    lines: BTreeMap<usize, VecDeque<usize>>,
}

impl WaitingLines {
    /// An empty queue for the pods of a trace.
    pub(crate) fn new(pods: &[TracePod]) -> Self {
        let mut kinds = BTreeMap::new();
        let mut priorities = Vec::new();
        let line_of = pods.iter().map(|pod| {
            let shape = pod
                .request()
                .map(|request| GpuRequest { policy: request.policy, ..request.shape() });
            let kind = (pod.priority(), pod.cpu_milli, pod.memory_mib, shape);
            *kinds.entry(kind).or_insert_with(|| {
                priorities.push(pod.priority());
                priorities.len() - 1
            })
        });
        let line_of = line_of.collect();
        Self { line_of, priorities, lines: BTreeMap::new() }
    }

    /// Whether an equal pod waits, so that this one does not fit either.
    pub(crate) fn has_equal(&self, pod: usize) -> bool {
        self.lines.contains_key(&self.line_of[pod])
    }

    /// Lets an arrival wait behind all that came before.
    pub(crate) fn join(&mut self, arrival: usize, pod: usize) {
        self.lines.entry(self.line_of[pod]).or_default().push_back(arrival);
    }

    /// The oldest arrival of each line; the most important and then oldest of all first.
    pub(crate) fn fronts(&self) -> BTreeSet<Front> {
        let lines = self.lines.iter();
        lines.filter_map(|(line, waiting)| Some(self.front(*waiting.front()?, *line))).collect()
    }

    fn front(&self, arrival: usize, line: usize) -> Front {
        (Reverse(self.priorities[line]), arrival, line)
    }

    /// Removes the front of a line, and returns the next one.
    pub(crate) fn leave(&mut self, line: usize) -> Option<Front> {
        let waiting = self.lines.get_mut(&line)?;
        waiting.pop_front();
        let next = waiting.front().copied();
        if next.is_none() {
            self.lines.remove(&line);
        }
        Some(self.front(next?, line))
    }

    /// All that wait, in no particular order.
    pub(crate) fn all(&self) -> impl Iterator<Item = usize> {
        self.lines.values().flatten().copied()
    }
}
