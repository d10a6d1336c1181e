//! What the extender and the webhook serve: verbs, page, metrics, TLS, and the certificates that it makes.

/// When certificates are signed again. Pure values.
pub mod rotation {
    pub mod plan;
}

/// Certificates that gpupack makes, checks and keeps in Secrets.
pub mod issuing {
    pub mod pair;
    pub mod checked;
    pub mod authority;
    pub mod objects;
    pub mod own_files;
    pub mod faults;
    pub mod keeper;
}

/// Connections and their limits, and what browsers may do.
pub mod http {
    pub(crate) mod bell;
    pub mod respond;
    pub mod browser;
    pub(crate) mod leading;
    pub(crate) mod listener_limits;
    pub mod tls;
    pub(crate) mod exchange;
    pub(crate) mod connections;
}

/// The verbs *filter*, *prioritize* and *preempt*.
pub mod scheduler {
    pub mod preempt;
    pub mod template;
    pub mod verbs;
}

/// Reports of the agents for the ledger, and what the replies have.
#[deny(missing_docs)] // others read it
pub mod reports {
    pub mod checked_report;
    pub mod reply;
}

/// Answers for people.
pub mod views {
    pub mod viewer;
    pub mod advice;
    pub(crate) mod pods;
    pub mod waiting;
    pub mod teams;
    pub mod explain;
    pub(crate) mod fits;
    pub(crate) mod devices;
    pub mod state;
    pub(crate) mod search;
}

/// The page in the browser.
pub mod page {
    pub mod cells;
    pub mod summary;
    pub(crate) mod trend;
    pub mod live;
    pub mod service;
    pub(crate) mod stream;
    pub(crate) mod routes;
}

/// What Prometheus has from before the start.
pub mod history {
    pub mod series;
    pub(crate) mod recall;
}

/// Routes, who may call them, and background loops.
pub mod api {
    pub mod background;
    pub(crate) mod queries;
    pub mod agents;
    pub mod people;
    pub mod resources;
    pub mod reports;
    pub(crate) mod clears;
    pub(crate) mod replicas;
    pub(crate) mod scrape;
    pub mod server;
    pub mod openapi;
    pub mod webhook;
}
