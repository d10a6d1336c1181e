//! Clock, tasks without I/O, HTTP client and certificate files.

pub mod causes;
pub mod clock;
pub mod certificates;
pub mod http_client;

/// Start and end of a process.
pub mod process {
    pub mod logging;
    pub mod signals;
}

/// Tasks without I/O: `step(event, now) -> actions`.
pub mod step {
    pub mod api_server;
    pub mod outside;
    pub mod news;
    pub mod pulse;
}
