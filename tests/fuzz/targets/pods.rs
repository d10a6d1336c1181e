use std::collections::BTreeMap;
use std::sync::LazyLock;

use engine::model::request::{Amount, GpuRequest, Isolation, Limit};
use k8s_openapi::api::core::v1::Pod;
use kube_api::admission::rules::Admission;
use kube_api::config::file::Config;
use kube_api::pod::seen_pod::SeenPod;
use kube_api::pod::watched::watched_pod;
use kube_api::request::annotations::{
    CONTAINER, DEVICE_COUNT, FRACTION, FRACTION_LIMIT, ISOLATION, MEMORY, MEMORY_LIMIT, MODEL,
    POLICY, parse_request,
};
use kube_api::request::placement::{PLACED_PREFIX, PLACEMENT, decode, encode};
use kube_api::request::quantity::{
    parse_count, parse_fraction, parse_memory, parse_memory_with_unit, parse_milli, parse_whole,
};
use kube_api::request::resources::{ContainerKind, ContainerRequest, MIG_PREFIX, SHARED_SLOT};
use kube_api::request::written::{WrittenAnnotations, patch_to};
use serde_json::{Value, json};
use wire::ids::NodeName;

/// A pod: kube-scheduler's body, the watch and a whole object say the same of it.
pub(crate) fn pod(json: &[u8]) {
    let Ok(text) = std::str::from_utf8(json) else { return };
    let of_verb = SeenPod::from_json(text);
    let of_watch = watched_pod(text);
    let whole = serde_json::from_slice::<Pod>(json).map(|pod| SeenPod::from_api(&pod));
    if let (Ok(verb), Ok(whole)) = (&of_verb, &whole) {
        assert_eq!(verb, whole);
    }
    if let Ok(watched) = &of_watch {
        assert!(of_verb.as_ref().is_ok_and(|it| it == watched) || of_verb.is_err());
        assert!(whole.as_ref().is_ok_and(|it| it == watched) || whole.is_err());
    }
    assert!(of_verb.is_err() || of_watch.is_ok(), "only the verbs read it: {:?}", of_watch.err());
}

/// Annotations, and resources of containers: a request that is read, written again and read is the same.
///
/// A line is `key=value`, or `@container=resource=amount`.
pub(crate) fn request(text: &[u8]) {
    let Ok(text) = std::str::from_utf8(text) else { return };
    let (mut annotations, mut containers) = (BTreeMap::new(), Vec::<ContainerRequest>::new());
    for line in text.lines() {
        let Some((key, value)) = line.split_once('=') else { continue };
        let Some(name) = key.strip_prefix('@') else {
            annotations.insert(key.to_owned(), value.to_owned());
            continue;
        };
        if !containers.iter().any(|it| it.name == name) {
            let (name, kind) = (name.to_owned(), ContainerKind::Regular);
            containers.push(ContainerRequest { name, kind, resources: BTreeMap::new() });
        }
        if let Some((resource, amount)) = value.split_once('=') {
            let container = containers.iter_mut().find(|it| it.name == name).unwrap();
            container.resources.insert(resource.to_owned(), amount.to_owned());
        }
    }
    let Ok(Some(request)) = parse_request(&annotations, &containers) else { return };
    let (annotations, containers) = written(&request, containers);
    assert_eq!(parse_request(&annotations, &containers), Ok(Some(request)), "{annotations:?}");
}

/// The annotations and resources that make a request.
fn written(
    request: &GpuRequest,
    mut containers: Vec<ContainerRequest>,
) -> (BTreeMap<String, String>, Vec<ContainerRequest>) {
    containers.iter_mut().for_each(|it| it.resources.clear());
    let decimals =
        |millionths: u64| format!("{}.{:05}", millionths / 1_000_000, millionths % 1_000_000 / 10);
    let mut pairs: Vec<(&str, String)> = Vec::new();
    let resource = match &request.amount {
        Amount::MigInstance(profile) => Some(format!("{MIG_PREFIX}{}", profile.as_str())),
        Amount::SharedSlot => Some(SHARED_SLOT.to_owned()),
        amount => {
            let (share, memory) = match amount {
                Amount::Fraction(share) => (Some(*share), None),
                Amount::FractionAndMemory(share, memory) => (Some(*share), Some(*memory)),
                Amount::Memory(memory) => (None, Some(*memory)),
                _ => (Some(wire::units::Share::WHOLE), None),
            };
            pairs.extend(share.map(|it| (FRACTION, decimals(it.millionths()))));
            pairs.extend(memory.map(|it| (MEMORY, it.mib().to_string())));
            pairs.push((DEVICE_COUNT, request.count.to_string()));
            pairs.extend(request.container.as_ref().map(|it| (CONTAINER, it.to_string())));
            None
        }
    };
    if let Some(resource) = resource {
        let named = request.container.as_deref();
        let container = containers.iter_mut().find(|it| Some(it.name.as_str()) == named).unwrap();
        container.resources.insert(resource, request.count.to_string());
    }
    pairs.extend(request.limit.map(|limit| match limit {
        Limit::Fraction(share) => (FRACTION_LIMIT, decimals(share.millionths())),
        Limit::Memory(memory) => (MEMORY_LIMIT, format!("{}Mi", memory.mib())),
    }));
    let models: Vec<&str> = request.models.names().collect();
    pairs.extend((!models.is_empty()).then(|| (MODEL, models.join("|"))));
    pairs.extend(request.policy.map(|policy| (POLICY, policy.name().to_owned())));
    let isolation = match request.isolation {
        Isolation::None => "none",
        Isolation::Memory => "memory",
        Isolation::Hardware => "hardware",
    };
    pairs.push((ISOLATION, isolation.to_owned()));
    (pairs.into_iter().map(|(key, value)| (key.to_owned(), value)).collect(), containers)
}

/// Numbers: the parsers agree with each other, and what is read is written and read alike.
pub(crate) fn quantity(text: &[u8]) {
    let Ok(text) = std::str::from_utf8(text) else { return };
    if let Ok(share) = parse_fraction(text) {
        let millionths = share.millionths();
        assert!(millionths <= 1_000_000 && millionths % 10 == 0, "{text}: {millionths}");
        let written = format!("{}.{:05}", millionths / 1_000_000, millionths % 1_000_000 / 10);
        assert_eq!(parse_fraction(&written), Ok(share), "{text}");
    }
    if let Ok(memory) = parse_memory_with_unit(text) {
        assert_eq!(parse_memory(text), Ok(memory), "{text}");
    }
    if let Ok(memory) = parse_memory(text) {
        let written = format!("{}Mi", memory.mib());
        assert_eq!(parse_memory_with_unit(&written), Ok(memory), "{text}");
    }
    if let Ok(count) = parse_whole(text) {
        // A quantity may have 30 digits that count, and a count has at most 20.
        assert_eq!(parse_count(text), Ok(count), "{text}");
        assert_eq!(parse_whole(&count.to_string()), Ok(count), "{text}");
    }
    if let Ok(count) = parse_count(text) {
        match parse_milli(text) {
            Ok(milli) => assert_eq!(Some(milli), count.checked_mul(1_000), "{text}"),
            Err(_) => assert!(count.checked_mul(1_000).is_none(), "{text}: {count}"),
        }
    }
    if let (Ok(milli), Ok(memory)) = (parse_milli(text), parse_memory(text)) {
        let bytes = milli.div_ceil(1_000);
        assert!(memory.mib() == bytes.div_ceil(1 << 20), "{text}: {milli} and {memory}");
    }
}

/// The annotations of a placed pod, as JSON: what is read is written and read alike; written back after an edit
/// they keep what a newer gpupack wrote; and a pod's other annotations stay.
pub(crate) fn placement(json: &[u8]) {
    let Ok(annotations) = serde_json::from_slice::<BTreeMap<String, String>>(json) else { return };
    let node = NodeName::new("node");
    let ours = |key: &String| key.starts_with(PLACED_PREFIX);
    let kept: BTreeMap<String, String> = WrittenAnnotations::of(&annotations).kept().collect();
    assert!(kept.iter().all(|(key, value)| ours(key) && annotations.get(key) == Some(value)));
    let Ok(Some(placement)) = decode(&annotations, &node) else { return };
    let mut wanted = encode(&placement).unwrap();
    assert_eq!(decode(&wanted, &node), Ok(Some(placement.clone())));
    let has_more = kept.contains_key(PLACEMENT);
    wanted.extend(kept);
    assert_eq!(decode(&wanted, &node), Ok(Some(placement)), "with what a newer gpupack wrote");
    let known = |value: &str| serde_json::from_str::<Value>(value).unwrap();
    if !has_more {
        let fields = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        let all = ["devices", "isolation", "protection", "v"];
        let read = known(&annotations[PLACEMENT]);
        let unknown: Vec<String> =
            fields(&read).into_iter().filter(|field| !all.contains(&field.as_str())).collect();
        assert!(unknown.is_empty(), "lost when written back: {unknown:?}");
    }
    // Another client took all of it away, and wrote something of its own.
    let edited: BTreeMap<String, String> = annotations
        .iter()
        .filter(|(key, _)| !ours(key))
        .map(|(key, value)| (key.clone(), value.clone()))
        .chain([(format!("{PLACED_PREFIX}made-up"), "1".to_owned())])
        .collect();
    let mut restored = edited.clone();
    for (key, value) in patch_to(&wanted, &edited) {
        match value {
            Some(value) => drop(restored.insert(key, value)),
            None => drop(restored.remove(&key)),
        }
    }
    for (key, value) in &restored {
        let expected = if ours(key) { wanted.get(key) } else { annotations.get(key) };
        assert_eq!(expected, Some(value), "{key}");
    }
    assert!(wanted.iter().all(|(key, value)| restored.get(key) == Some(value)));
}

/// Rules of admission as clusters configure them.
static RULES: LazyLock<Vec<(Admission, Config)>> = LazyLock::new(|| {
    let texts = [
        "{}",
        "webhook: {memory_limit: mps, mps_thread_percentage: share, runtime_class: none}",
        "webhook: {memory_limit: driver, take_over_whole_gpus: true, unmanaged_runtime_class: blank}",
        "{scheduler_names: [gpupack, default-scheduler], min_memory_mib: 1024, max_limit: 0.8}",
        "webhook: {templates: {jobsets.jobset.x-k8s.io: [spec/replicatedJobs/*/template/spec/template]}}",
    ];
    let rules = texts.into_iter().map(|text| {
        let config = Config::from_yaml(text).unwrap();
        let rules = Admission::new(config.webhook.clone(), config.scheduler_names.clone());
        (rules.under(config.request_rules()), config)
    });
    rules.collect()
});

/// An AdmissionReview: the answer is whole, the completed pod or template is admitted unchanged, and the verbs read
/// from a pod the request that was admitted.
pub(crate) fn review(body: &[u8]) {
    for (rules, config) in &*RULES {
        let Ok(answer) = rules.review(body) else { continue };
        let mut asked: Value = serde_json::from_slice(body).unwrap();
        let answered: Value = serde_json::from_slice(&answer.review).unwrap();
        let response = &answered["response"];
        assert_eq!(response["uid"], asked["request"]["uid"]);
        assert_eq!(response["allowed"], answer.refusal.is_none());
        if answer.refusal.is_some() {
            assert!(
                response.get("patch").is_none_or(Value::is_null),
                "a refused pod is not changed"
            );
            continue;
        }
        let pod = &mut asked["request"]["object"];
        if let Some(patch) = response["patch"].as_array() {
            let bytes: Vec<u8> =
                patch.iter().map(|it| u8::try_from(it.as_u64().unwrap()).unwrap()).collect();
            let patch: json_patch::Patch = serde_json::from_slice(&bytes).unwrap();
            json_patch::patch(pod, &patch).unwrap();
        }
        // The API server takes no pod with such a name; it looks after the webhooks.
        if has_long_name(&asked["request"]["object"]) {
            continue;
        }
        let again = rules.review(asked.to_string().as_bytes()).unwrap();
        assert!(again.refusal.is_none(), "the completed pod is refused: {:?}", again.refusal);
        let again: Value = serde_json::from_slice(&again.review).unwrap();
        let patch = &again["response"]["patch"];
        assert!(patch.is_null(), "the completed pod is changed once more: {asked}");
        let is_pod = asked["request"]["resource"]["resource"] == "pods";
        if is_pod && asked["request"].get("subResource").is_none_or(|it| it.is_null() || it == "") {
            completed(asked["request"]["object"].take(), config);
        }
    }
}

/// Whether a container has a name that is too long, in a pod or in a template anywhere in an object.
fn has_long_name(object: &Value) -> bool {
    let is_long = |it: &Value| it["name"].as_str().is_some_and(|name| name.len() > 63);
    match object {
        Value::Object(fields) => fields.iter().any(|(key, value)| {
            (key == "containers" && value.as_array().is_some_and(|all| all.iter().any(is_long)))
                || has_long_name(value)
        }),
        Value::Array(items) => items.iter().any(has_long_name),
        _ => false,
    }
}

/// What the verbs and the watch read of an admitted pod.
fn completed(mut pod: Value, config: &Config) {
    let scheduler = pod["spec"]["schedulerName"].as_str().unwrap_or_default();
    let is_ours =
        scheduler != "default-scheduler" && config.scheduler_names.iter().any(|it| it == scheduler);
    // The API server refuses pods without containers itself.
    let has_containers = pod["spec"]["containers"].as_array().is_some_and(|all| !all.is_empty());
    if !is_ours || !has_containers || pod["metadata"].get("annotations").is_none() {
        return;
    }
    for (field, value) in [("uid", "u"), ("name", "p"), ("namespace", "n")] {
        pod["metadata"][field] = json!(value);
    }
    let watched = watched_pod(&pod.to_string());
    let Ok(mut seen) = SeenPod::from_json(&pod.to_string()) else { return };
    assert_eq!(Some(&seen), watched.as_ref().ok());
    seen.judge(&config.request_rules());
    let request = seen.request.as_ref().expect("what is admitted is no error in a verb");
    let takes = request.is_none() || seen.containers.takes_devices;
    assert!(takes, "an admitted GPU pod takes its devices: {pod}");
}
