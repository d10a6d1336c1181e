//! `GET /v1/fit`: which GPUs a request could get now, by the fit function that places pods;
//! `GET /v1/fragmentation`: where free share is that no typical request can use.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::config::requests::RequestRules;
use crate::control::pods::wording::in_words;
use crate::control::shared::app::App;
use crate::hardware::units::HostAmount;
use crate::kube_api::request::annotations::{
    DEVICE_COUNT, FRACTION, ISOLATION, MEMORY, MODEL, parse_request,
};
use crate::kube_api::request::other_keys::check;
use crate::kube_api::request::resources::{ContainerAsk, ContainerKind};
use crate::ledger::query::questions::PlacementRequest;
use crate::model::fit::HostRule;
use crate::model::request::GpuRequest;
use crate::scoring::strategy::Strategy;

/// Longest value of a query, in bytes.
const MAX_VALUE: usize = 512;

/// The keys of a query.
const KEYS: &str = "`fraction`, `memory`, `count`, `model`, `isolation` and `mig`, or `pod` alone";

/// Where a request fits.
#[derive(Debug, Serialize)]
pub(crate) struct Fits {
    /// The request in words.
    pub asks: String,
    /// GPUs that it could get, wholly or in part; each that could be one of several.
    pub gpus: usize,
    /// Number of nodes that fit.
    pub nodes: usize,
    /// By node name: positions of these GPUs in the node's `gpus` of `/v1/summary`.
    pub on: BTreeMap<String, Vec<usize>>,
}

/// Where the request in `query` fits now. Makes no hold and notes nothing.
///
/// # Errors
/// What is wrong with the query, and a suggestion.
pub(crate) fn fits(app: &App, query: &BTreeMap<String, String>) -> Result<Fits, String> {
    let request = match query.get("pod") {
        Some(pod) => waiting_request(app, query, pod)?,
        None => request(&app.request_rules, query)?,
    };
    let asks = in_words(&request);
    let policy = Strategy::Policy(app.config.policy);
    let (host, host_rule) = (HostAmount::ZERO, HostRule::Trusted);
    let question = PlacementRequest { gpu: Some(request), host, host_rule, strategy: policy };
    let found = app.ledger.fitting(&question);
    Ok(Fits {
        asks,
        gpus: found.iter().map(|(_, gpus)| gpus.len()).sum(),
        nodes: found.len(),
        on: found.into_iter().map(|(node, gpus)| (node.to_string(), gpus)).collect(),
    })
}

/// The request of a waiting pod.
fn waiting_request(
    app: &App,
    query: &BTreeMap<String, String>,
    pod: &str,
) -> Result<GpuRequest, String> {
    if query.len() > 1 {
        return Err("`pod` is asked for alone: its own request is what counts".to_owned());
    }
    let named =
        pod.split_once('/').and_then(|(namespace, name)| app.waiting.named(namespace, name));
    let request = named.and_then(|state| state.waiting.question.gpu);
    request.ok_or_else(|| {
        let shown: String = pod.chars().take(MAX_VALUE).collect();
        format!("no pod `{shown}` waits for a GPU: say /v1/fit?pod=NAMESPACE/NAME")
    })
}

/// The request of a pod with these annotations, read by the one parser.
fn request(rules: &RequestRules, query: &BTreeMap<String, String>) -> Result<GpuRequest, String> {
    let mut annotations = BTreeMap::new();
    let mut container = ContainerAsk {
        name: "gpu".to_owned(),
        kind: ContainerKind::Regular,
        resources: BTreeMap::new(),
    };
    for (key, value) in query {
        if value.len() > MAX_VALUE {
            return Err(format!("`{key}` is longer than {MAX_VALUE} bytes"));
        }
        let annotation = match key.as_str() {
            "fraction" => FRACTION,
            "memory" if value.bytes().all(|byte| byte.is_ascii_digit()) => MEMORY,
            "memory" => "nvidia.com/container.gpu.gpu-memory.request",
            "count" => DEVICE_COUNT,
            "model" => MODEL,
            "isolation" => ISOLATION,
            "mig" => {
                container.resources.insert(format!("nvidia.com/mig-{value}"), "1".to_owned());
                continue;
            }
            _ => {
                let shown: String = key.chars().take(40).collect();
                return Err(format!("`{shown}` cannot be asked for: there are {KEYS}"));
            }
        };
        annotations.insert(annotation.to_owned(), value.clone());
    }
    match parse_request(&annotations, &[container]) {
        Ok(Some(request)) => {
            check(rules, Some(&request), &[]).map_err(|error| error.to_string())?;
            Ok(GpuRequest { min_memory: rules.min_memory, ..request })
        }
        Ok(None) => Err(format!(
            "say what is asked for, such as /v1/fit?fraction=0.25 or /v1/fit?memory=16Gi: there are {KEYS}"
        )),
        Err(error) => Err(error.to_string()),
    }
}

/// By node name: the free share that no typical request can use, in millionths of a GPU. Nodes
/// without any are left out.
pub(crate) fn fragmentation(app: &App) -> BTreeMap<String, u64> {
    let nodes = app.ledger.packing_by_node().into_iter();
    let fragmented = nodes.map(|(node, it)| (node.to_string(), it.fragmented_share().millionths()));
    fragmented.filter(|(_, share)| *share > 0).collect()
}
