//! The weights of the terms of the policy `fragmentation`; `docs/packing.md` says what each is for.

/// How much each term counts. The defaults are those of the product; the simulator changes them, to
/// measure what each term gains.
#[derive(Clone, Copy, Debug)]
pub struct WasteWeights {
    /// Weight of waste in residuals: `H`.
    pub residuals: f64,
    /// After how many requests `H` has half of its weight.
    pub doubt: f64,
    /// Waste of opening an empty GPU after a single request: `O`. It falls with the root of their
    /// number.
    pub opening: f64,
    /// Rounds in which the prices of sizes in `H` are found; without one every size is sought after
    /// alike.
    pub price_rounds: usize,
    /// Weight of free GPU share that the CPU and host memory of the node cannot serve: `J`.
    pub host: f64,
    /// Weight of CPU in pieces: `P`.
    pub pieces: f64,
    /// Weight of free GPUs that are together on one node, where pods end: `C`.
    pub together: f64,
    /// Weight of the turnover; without it nothing is believed to end.
    pub turnover: f64,
    /// Price of room for requests of several devices if they need all that is free of it: `W`.
    pub several: f64,
    /// Price of the last device that makes a node unusable for the largest requests, if others are
    /// free: `K`.
    pub kept_nodes: f64,
    /// Price of the share of a GPU, as pods of memory take less of some: `S`.
    pub share: f64,
    /// How many requests the prior for whole nodes counts as.
    pub whole_nodes: f64,
    /// Price of a device class if all that is free of it is needed: `B`.
    pub scarce: f64,
    /// Number of requests of which one is expected to fill a whole node, for each shape of node.
    pub rare_one_in: f64,
}

impl Default for WasteWeights {
    fn default() -> Self {
        Self {
            residuals: 5.0,
            doubt: 50.0,
            opening: 5.0,
            price_rounds: 200,
            host: 2.0,
            pieces: 1.0,
            together: 0.25,
            turnover: 1.0,
            several: 20.0,
            kept_nodes: 0.1,
            share: 5.0,
            whole_nodes: 50.0,
            scarce: 10.0,
            rare_one_in: 20_000.0,
        }
    }
}
