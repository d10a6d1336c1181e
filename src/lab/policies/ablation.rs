//! The policy `fragmentation` without one of its terms, to measure what each gains; `docs/packing.md` says
//! what they are for.

use engine::waste::weights::WasteWeights;
use sim::run::policy::SimPolicy;

/// The policy without each term, in the order of the documentation.
pub(crate) fn ablations() -> [SimPolicy; 14] {
    let all = WasteWeights::default();
    [
        ("without-residuals", WasteWeights { residuals: 0.0, ..all }),
        ("without-residual-prices", WasteWeights { price_rounds: 0, ..all }),
        ("without-doubt", WasteWeights { doubt: 0.0, ..all }),
        ("without-opening", WasteWeights { opening: 0.0, ..all }),
        ("without-host", WasteWeights { host: 0.0, ..all }),
        ("without-pieces", WasteWeights { pieces: 0.0, ..all }),
        ("without-together", WasteWeights { together: 0.0, ..all }),
        ("without-turnover", WasteWeights { turnover: 0.0, ..all }),
        ("without-several", WasteWeights { several: 0.0, kept_nodes: 0.0, ..all }),
        ("without-kept-nodes", WasteWeights { kept_nodes: 0.0, ..all }),
        ("without-share", WasteWeights { share: 0.0, ..all }),
        ("without-whole-nodes", WasteWeights { whole_nodes: 0.0, ..all }),
        ("without-scarce", WasteWeights { scarce: 0.0, ..all }),
        ("without-rare", WasteWeights { rare_one_in: f64::INFINITY, ..all }),
    ]
    .map(|(name, weights)| SimPolicy {
        name,
        weights: Some(weights),
        ..SimPolicy::FRAGMENTATION
    })
}
