//! Whether a node takes GPU pods, as far as the last pods that started there got their GPU.
//!
//! Pods without their GPU fail within seconds, so such a node would be free again at once and draw the whole queue.
//! After two of them it takes no more, until there is a sign that containers get the driver there. Kept in memory
//! alone: a process that starts again finds out again.

use std::time::Duration;

use wire::ids::PodUid;
use wire::mutation::{Mutation, mutated};
use wire::units::Timestamp;

/// How long a node takes no pod before one is let in as a trial.
pub const TRIAL_AFTER: Duration = Duration::from_secs(300);

/// How long a pod that is tried keeps others away before it has started: its image may be pulled.
const TRIED_FOR: Duration = Duration::from_secs(120);

/// Whether a pod that started got its GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Start {
    /// Its container does not have the driver.
    Blind,
    /// It has the driver, or uses a device.
    Seen,
}

/// Whether a node takes GPU pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Intake {
    /// It does. The last pod that started there may have been blind.
    Open {
        /// That pod.
        blind: Option<PodUid>,
    },
    /// The last two pods were blind.
    Closed {
        /// When the second one was seen.
        since: Timestamp,
    },
    /// It takes one pod as a trial.
    Trial,
    /// A pod is there as a trial, and whether it got its GPU is not known yet.
    Tried {
        /// The pod.
        pod: PodUid,
        /// When it came.
        since: Timestamp,
    },
}

impl Default for Intake {
    fn default() -> Self {
        Self::OPEN
    }
}

impl Intake {
    const OPEN: Self = Self::Open { blind: None };

    /// Whether a pod may be placed there.
    pub fn takes_pods(&self) -> bool {
        match self {
            Self::Open { .. } | Self::Trial => true,
            Self::Closed { .. } | Self::Tried { .. } => mutated(Mutation::BlindStartsIgnored),
        }
    }

    /// Whether the last pods did not get their GPU.
    pub fn is_doubtful(&self) -> bool {
        !matches!(self, Self::Open { .. })
    }

    /// A pod has started. A pod that starts again and again without its GPU is one sign, not two.
    #[must_use]
    pub fn after_start(&self, pod: &PodUid, start: Start, now: Timestamp) -> Self {
        match (start, self) {
            (Start::Seen, _) => Self::OPEN,
            (Start::Blind, Self::Open { blind: None }) => Self::Open { blind: Some(pod.clone()) },
            (Start::Blind, Self::Open { blind: Some(other) }) if other != pod => {
                Self::Closed { since: now }
            }
            (Start::Blind, Self::Tried { pod: tried, .. }) if tried == pod => {
                Self::Closed { since: now }
            }
            // Of pods that came before it was closed.
            (Start::Blind, same) => same.clone(),
        }
    }

    /// An agent that has the driver has come: its container is younger than the doubt.
    #[must_use]
    pub fn after_new_agent(&self) -> Self {
        if mutated(Mutation::BlindNodeStays) { self.clone() } else { Self::OPEN }
    }

    /// A pod is placed there.
    #[must_use]
    pub fn after_placing(&self, pod: &PodUid, now: Timestamp) -> Self {
        match self {
            Self::Trial if mutated(Mutation::TrialsUnlimited) => Self::Trial,
            Self::Trial => Self::Tried { pod: pod.clone(), since: now },
            same => same.clone(),
        }
    }

    /// A pod has left, whether it started or not.
    #[must_use]
    pub fn after_leaving(&self, pod: &PodUid) -> Self {
        match self {
            Self::Tried { pod: tried, .. } if tried == pod => Self::Trial,
            same => same.clone(),
        }
    }

    /// Whether time has changed it.
    pub fn is_due(&self, now: Timestamp) -> bool {
        match self {
            Self::Closed { since } if mutated(Mutation::TrialTooEarly) => {
                now.since(*since) >= TRIAL_AFTER / 5
            }
            Self::Closed { since } => now.since(*since) >= TRIAL_AFTER,
            Self::Tried { since, .. } => now.since(*since) >= TRIED_FOR,
            Self::Open { .. } | Self::Trial => false,
        }
    }

    /// Time has passed: a pod may be tried, or another one if of the last no start is known.
    #[must_use]
    pub fn after_time(&self, now: Timestamp) -> Self {
        if self.is_due(now) { Self::Trial } else { self.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plays a history: `b p` and `s p` are starts of a pod, `+ p` and `- p` its coming and leaving, `agent` a new
    /// agent, a number the seconds that pass. Returns whether pods are taken after each step.
    fn played(history: &str) -> String {
        let (mut intake, mut now) = (Intake::default(), Timestamp::START);
        let mut words = history.split_whitespace();
        let mut shown = String::new();
        while let Some(word) = words.next() {
            let mut pod = || PodUid::new(words.next().expect("a pod"));
            intake = match word {
                "b" => intake.after_start(&pod(), Start::Blind, now),
                "s" => intake.after_start(&pod(), Start::Seen, now),
                "+" => intake.after_placing(&pod(), now),
                "-" => intake.after_leaving(&pod()),
                "agent" => intake.after_new_agent(),
                seconds => {
                    now = now.plus(Duration::from_secs(seconds.parse().expect("seconds")));
                    intake.after_time(now)
                }
            };
            shown.push(if intake.takes_pods() { '.' } else { 'x' });
        }
        shown
    }

    #[test]
    fn a_node_is_closed_after_two_blind_pods_and_opens_by_a_sign() {
        for (history, expected, why) in [
            ("b p b q", ".x", "two in a row"),
            ("b p b p b p", "...", "one pod that is restarted"),
            ("b p s q b r", "...", "one in between sees its GPU"),
            ("b p b q s r", ".x.", "a pod there sees a GPU"),
            ("b p b q agent", ".x.", "the agent's container was made again"),
            ("b p b q agent b r b t", ".x..x", "and that did not help"),
            ("b p b q 299 1", ".xx.", "a trial"),
            (
                "b p b q 300 + r 119 1",
                ".x.xx.",
                "a trial of which nothing is known, and another one",
            ),
            ("b p b q 300 + r b r 299 1", ".x.xxx.", "a blind trial"),
            ("b p b q 300 + r s r + t + u", ".x.x...", "a trial that went well"),
            ("b p b q 300 + r - r + t", ".x.x.x", "a trial that never started"),
            ("b p b q 200 b p b q 100", ".xxxx.", "pods from before do not put it off"),
            ("b p b q 300 b p + r b q", ".x..xx", "nor end a trial"),
            ("+ p - p 900 + q", "....", "all is well"),
        ] {
            assert_eq!(played(history), expected, "{why}: {history}");
        }
    }
}
