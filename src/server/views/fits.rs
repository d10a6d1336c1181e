//! `GET /v1/fit`: which GPUs a request could get now, by the fit function that places pods;
//! `GET /v1/fragmentation`: where free share is that no typical request can use.

use std::collections::BTreeMap;

use crate::views::viewer::Viewer;
use control::pods::wording::in_words;
use control::shared::app::App;
use engine::ledger::query::own_room::OwnRoom;
use engine::ledger::query::queries::PlacementRequest;
use engine::ledger::suggest::waiting::WaitingState;
use engine::model::fit::HostRule;
use engine::model::request::GpuRequest;
use engine::scoring::strategy::Strategy;
use kube_api::config::pods::requests::RequestRules;
use kube_api::request::annotations::{
    DEVICE_COUNT, FRACTION, ISOLATION, MEMORY, MODEL, parse_request,
};
use kube_api::request::other_keys::check;
use kube_api::request::resources::{ContainerKind, ContainerRequest};
use wire::api::fit::{Fit, Fragmentation};
use wire::api::kind::{ApiVersion, FitKind, FragmentationKind};
use wire::units::HostAmount;

/// Longest value of a query, in bytes.
const MAX_VALUE: usize = 512;

/// The keys of a query.
const KEYS: &str = "`fraction`, `memory`, `count`, `model`, `isolation` and `mig`, or `pod` alone";

/// Where the request in `query` fits now. Makes no hold and notes nothing.
///
/// # Errors
/// What is wrong with the query, and a suggestion.
pub(crate) fn fits(
    app: &App,
    query: &BTreeMap<String, String>,
    viewer: &Viewer,
) -> Result<Fit, String> {
    let (request, own) = match query.get("pod") {
        Some(pod) => waiting_request(app, query, pod, viewer)?,
        None => (request(&app.request_rules, query)?, OwnRoom::default()),
    };
    let words = in_words(&request);
    let policy = Strategy::Policy(app.config.policy);
    let (host, host_rule) = (HostAmount::ZERO, HostRule::Trusted);
    let query = PlacementRequest { gpu: Some(request), host, host_rule, strategy: policy };
    let found = app.ledger.fitting(&query, &own);
    Ok(Fit {
        api_version: ApiVersion::default(),
        kind: FitKind::default(),
        request: words,
        gpus: found.iter().map(|(_, gpus)| gpus.len()).sum(),
        nodes: found.len(),
        gpus_by_node: found.into_iter().map(|(node, gpus)| (node.to_string(), gpus)).collect(),
    })
}

/// The request of a waiting pod, and the room that is kept for it.
fn waiting_request(
    app: &App,
    query: &BTreeMap<String, String>,
    pod: &str,
    viewer: &Viewer,
) -> Result<(GpuRequest, OwnRoom), String> {
    if query.len() > 1 {
        return Err("`pod` must be the only key: the request of that pod is what counts".to_owned());
    }
    let named =
        pod.split_once('/').and_then(|(namespace, name)| app.waiting.named(namespace, name));
    let seen = named.filter(|_| viewer.sees_pod(pod));
    let request = seen.and_then(|WaitingState { waiting, .. }| {
        Some((waiting.query.gpu?, app.ledger.own_room(&waiting.pod.uid)))
    });
    request.ok_or_else(|| {
        let shown: String = pod.chars().take(MAX_VALUE).collect();
        format!("no pod `{shown}` waits for a GPU: use /v1/fit?pod=NAMESPACE/NAME")
    })
}

/// The request of a pod with these annotations, read by the one parser.
fn request(rules: &RequestRules, query: &BTreeMap<String, String>) -> Result<GpuRequest, String> {
    let mut annotations = BTreeMap::new();
    let mut container = ContainerRequest {
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
                return Err(format!("`{shown}` is no key of this query: there are {KEYS}"));
            }
        };
        annotations.insert(annotation.to_owned(), value.clone());
    }
    match parse_request(&annotations, &[container]) {
        Ok(Some(request)) => {
            check(rules, Some(&request), &[]).map_err(|error| error.to_string())?;
            Ok(GpuRequest { min_memory: rules.min_memory, ..rules.meant(&request) })
        }
        Ok(None) => Err(format!(
            "name a request, such as /v1/fit?fraction=0.25 or /v1/fit?memory=16Gi: the keys are {KEYS}"
        )),
        Err(error) => Err(error.to_string()),
    }
}

/// The free share of each node that no typical request can use.
pub(crate) fn fragmentation(app: &App) -> Fragmentation {
    let nodes = app.ledger.packing_by_node().into_iter();
    let fragmented =
        nodes.map(|(node, packing)| (node.to_string(), packing.fragmented_share().millionths()));
    Fragmentation {
        api_version: ApiVersion::default(),
        kind: FragmentationKind::default(),
        share_millionths_by_node: fragmented.filter(|(_, share)| *share > 0).collect(),
    }
}
