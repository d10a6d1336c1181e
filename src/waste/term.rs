//! The parts of the policy `fragmentation`: each can be left out, to see what it is worth.

/// A part of the policy `fragmentation`; `docs/packing.md` says what each is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CostTerm {
    /// Waste in what is left of shared GPUs: `H`.
    Residuals,
    /// The prices of sizes in it: without them every size is sought after alike.
    HolePrices,
    /// Waste for want of processor time and memory: `J`.
    Host,
    /// Processor time in pieces: `P`.
    Pieces,
    /// Room for requests of several devices: `M` at its price `W`.
    Several,
    /// The belief, until enough was asked for, that whole nodes will be.
    WholeNodes,
    /// The price of scarce classes: `B`.
    Scarce,
    /// The belief in it that something rare comes for every shape of node.
    Rare,
}

impl CostTerm {
    /// All of them, in the order of the documentation.
    pub const ALL: [Self; 8] = [
        Self::Residuals,
        Self::HolePrices,
        Self::Host,
        Self::Pieces,
        Self::Several,
        Self::WholeNodes,
        Self::Scarce,
        Self::Rare,
    ];
}
