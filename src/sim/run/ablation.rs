//! The terms of the policy `fragmentation`: each can be left out, to measure what it gains.

use crate::waste::weights::WasteWeights;

/// A term of the policy `fragmentation`; `docs/packing.md` says what each is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CostTerm {
    /// Expected waste in residuals: `H`.
    Residuals,
    /// The prices of sizes in `H`; without them every size is sought after alike.
    ResidualPrices,
    /// The small weight of `H` while few requests have come.
    Doubt,
    /// What it costs to open an empty GPU: `O`.
    Opening,
    /// Expected waste for lack of CPU or host memory: `J`.
    Host,
    /// CPU in pieces: `P`.
    Pieces,
    /// Room for requests of several devices: `M` at its price `W`.
    Several,
    /// The least price of room for several devices, while there is other room: `K`.
    KeptNodes,
    /// The price of the share that a placement takes: `S`.
    Share,
    /// The prior for requests of whole nodes, until enough requests have come.
    WholeNodes,
    /// The price of scarce classes: `B`.
    Scarce,
    /// The assumption that a rare request comes for every shape of node.
    Rare,
}

impl CostTerm {
    /// All of them, in the order of the documentation.
    pub const ALL: [Self; 12] = [
        Self::Residuals,
        Self::ResidualPrices,
        Self::Doubt,
        Self::Opening,
        Self::Host,
        Self::Pieces,
        Self::Several,
        Self::KeptNodes,
        Self::Share,
        Self::WholeNodes,
        Self::Scarce,
        Self::Rare,
    ];

    /// The weights of the policy, with none for this term.
    pub(crate) fn left_out(self) -> WasteWeights {
        let all = WasteWeights::default();
        match self {
            Self::Residuals => WasteWeights { residuals: 0.0, ..all },
            Self::ResidualPrices => WasteWeights { price_rounds: 0, ..all },
            Self::Doubt => WasteWeights { doubt: 0.0, ..all },
            Self::Opening => WasteWeights { opening: 0.0, ..all },
            Self::Host => WasteWeights { host: 0.0, ..all },
            Self::Pieces => WasteWeights { pieces: 0.0, ..all },
            Self::Several => WasteWeights { several: 0.0, kept_nodes: 0.0, ..all },
            Self::KeptNodes => WasteWeights { kept_nodes: 0.0, ..all },
            Self::Share => WasteWeights { share: 0.0, ..all },
            Self::WholeNodes => WasteWeights { whole_nodes: 0.0, ..all },
            Self::Scarce => WasteWeights { scarce: 0.0, ..all },
            Self::Rare => WasteWeights { rare_one_in: f64::INFINITY, ..all },
        }
    }
}
