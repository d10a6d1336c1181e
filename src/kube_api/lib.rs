//! Kubernetes: pods as seen, watch, writer, admission, identity, configuration, and the bodies of kube-scheduler.

/// The configuration file, checked.
pub mod config {
    pub mod values;
    pub mod advice;
    pub mod allowed;
    pub mod certificates;
    pub mod gone;
    pub mod guard;
    pub mod preemption;
    pub mod identity;
    pub mod lease;
    pub mod webhook;
    pub mod pools;
    /// What pods may request, and what that counts.
    pub mod pods {
        pub mod requests;
        pub mod quota;
        pub mod workloads;
    }
    pub mod file;
}

pub mod connection;

/// Annotations and resources of pods, read and written.
pub mod request {
    pub mod request_error;
    pub mod quantity;
    pub mod resources;
    pub(crate) mod annotation_values;
    pub mod annotations;
    pub mod bounded;
    pub mod other_keys;
    pub mod usable;
    pub mod placement;
    pub mod room_note;
    pub mod written;
}

/// What containers get of a placement.
pub mod containers {
    pub mod admission_error;
    pub mod container_view;
    pub mod mps;
    pub mod injection;
}

/// Pods and nodes from the API server.
pub mod pod {
    pub mod host;
    pub mod labels;
    pub(crate) mod pod_fields;
    pub mod start_failure;
    pub mod gpu_container;
    pub mod seen_parts;
    pub mod seen_pod;
    pub mod list;
    pub mod watched;
    pub(crate) mod namespaces;
    pub mod lists;
    pub mod watch;
}

/// Who calls, as the API server knows them.
pub mod identity {
    pub mod known_tokens;
    pub mod agent_tokens;
    pub mod people;
    pub mod front_proxy;
}

/// All writes to the API server.
pub mod write {
    pub mod target;
    pub mod events;
    pub mod outcome;
    pub mod term;
    pub mod writer;
    pub mod leader_lease;
    pub mod evict;
    pub mod trust;
    pub mod carry_out;
}

/// The rules of the webhook.
pub mod admission {
    pub(crate) mod pod_security;
    pub(crate) mod confinement;
    pub mod review;
    pub(crate) mod templates;
    pub mod rules;
}

/// The bodies of kube-scheduler's calls.
pub mod protocol {
    pub mod bounds;
    pub mod names;
    pub mod body_parts;
    pub mod messages;
}
