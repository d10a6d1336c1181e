//! Bodies of `/v1` and of reports, amounts and names: what extender, agents and their clients share.

#[doc(hidden)] // for tests
pub mod mutation;

/// The JSON bodies of `/v1`, and of commands with `--output json`, each declared once, for the server, its clients and the tests. Plain
/// types; `docs/openapi.json` is generated from them.
#[deny(missing_docs)] // others read it
pub mod api {
    pub mod kind;
    pub mod error;
    pub mod condition;
    pub mod state;
    pub mod waiting;
    pub mod moves;
    pub mod explain;
    pub mod advice;
    pub mod fit;
    pub mod search;
    pub mod page;
    pub mod commands;
}

pub mod units;
pub mod ids;
pub mod device;
pub mod seen;
#[deny(missing_docs)] // others read it
pub mod driver_work;
pub mod json_object;

/// Reports of the agents, what is believed of them, and the replies.
#[deny(missing_docs)] // others read it
pub mod report {
    pub mod report_limits;
    pub mod bodies;
    pub mod refusal;
    pub mod mig;
    pub mod details;
}
