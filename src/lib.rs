//! stub

/// The simulator: replays public workload traces and draws the result.
pub mod sim {
    pub mod chart;
    mod chart_layout;
    pub mod go_rand;
    mod go_rand_table;
    mod table;
    pub mod trace;
    pub mod workload;
}
