//! What happens to a pod: bind, kept room, requeue, who leads, restarts; and the metrics that count it.

/// Prometheus families.
pub mod metrics {
    pub(crate) mod make;
    pub mod fleet;
    pub mod demand;
    pub mod labels;
    pub mod guard;
    pub mod mig;
    pub mod moves;
    pub(crate) mod service;
    pub mod registry;
}

/// Guests that are moved home.
pub mod moving;

/// Orders of people to clear a GPU.
pub mod clearing;

/// What the other modules share.
pub mod shared {
    pub mod bind_error;
    pub mod bind_locks;
    pub mod edited;
    pub mod in_flight;
    pub mod leader;
    pub mod kept_suggestions;
    pub mod other_fences;
    pub mod outbox;
    pub mod passed;
    pub mod priority_classes;
    pub mod app;
    pub mod log_limit;
}

/// A Binding, from the call to the proof of its outcome; what it takes back from guests and from pods with limits.
pub mod bind {
    pub(crate) mod made_up_calls;
    pub mod settle;
    pub(crate) mod start_fence;
    pub(crate) mod start_limits;
    pub mod recall;
    pub mod take_back;
    pub(crate) mod restart_blind;
    pub mod binding;
    pub mod edits;
}

/// Waiting pods, over-limit pods, and what teams pay; ledger events.
pub mod pods {
    pub(crate) mod known_pods;
    pub mod memory_guard;
    pub(crate) mod pod_events;
    pub mod proposals;
    pub mod wording;
    pub mod group_state;
    pub mod why;
    pub mod reasons;
    pub mod requeue;
    pub(crate) mod requeue_write;
    pub mod chargeback;
    pub(crate) mod ledger_events;
}

/// Room that is kept for waiting pods, and made for important ones.
pub mod room {
    pub(crate) mod owners;
    pub(crate) mod group_rooms;
    pub mod standing;
    pub(crate) mod preempting;
    pub(crate) mod groups;
    pub(crate) mod team_limits;
    pub(crate) mod make_room;
    #[cfg(test)]
    pub(crate) mod fixture;
}

/// Which replica leads.
pub mod lead {
    pub mod informing;
    pub(crate) mod candidate;
    pub(crate) mod election;
}

/// Runs all of it.
pub mod loops;
