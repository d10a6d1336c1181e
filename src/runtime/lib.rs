//! Clock, tasks without I/O, HTTP client and certificate files.

pub mod causes;
pub mod clock;
pub mod certificates;
pub mod http_client;

/// Tasks without I/O: `step(event, now) -> actions`.
pub mod step {
    pub mod api_server;
    pub mod outside;
    pub mod news;
    pub mod pulse;
}
