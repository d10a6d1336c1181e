//! Bodies of the extender protocol as kube-scheduler sends them, and answers byte for byte.

use engine::model::policy::Policy;
use engine::model::rejection::Rejection;
use engine::model::request::{Amount, Limit};
use kube_api::protocol::messages::{
    ExtenderArgs, ExtenderBindingArgs, ExtenderBindingResult, ExtenderFilterResult, HostPriority,
    NodesArg, Passed, host_priorities_json,
};
use wire::ids::NodeName;
use wire::units::{MemMib, Share};

fn data(name: &str) -> Vec<u8> {
    let path = format!("{}/tests/data/extender/{name}", env!("CARGO_MANIFEST_DIR"));
    let mut bytes = std::fs::read(&path).expect(&path);
    assert_eq!(bytes.pop(), Some(b'\n'), "{path} ends in a line break");
    bytes
}

fn check_answer(answer: &[u8], name: &str) {
    assert_eq!(String::from_utf8_lossy(answer), String::from_utf8_lossy(&data(name)), "{name}");
}

#[test]
fn a_full_pod_is_read_from_a_filter_body() {
    let body = data("filter.json");
    let args = ExtenderArgs::parse(&body).unwrap();
    assert_eq!(args.nodes.names(), ["gpu-c", "gpu-a", "gpu-b"]);
    let pod = args.pod;
    assert_eq!(pod.pod.to_string(), "team-a/infer-7f9c6d5b8-x2kqz");
    assert_eq!((pod.resource_version.as_str(), pod.scheduling.priority), ("48213", 1000));
    assert_eq!(pod.node, None::<NodeName>);
    // The maximum is regular container plus sidecar in memory, and the init container in CPU.
    assert_eq!((pod.host.cpu.milli(), pod.host.memory), (2000, MemMib::new(8192 + 64)));
    let request = pod.request.unwrap().unwrap();
    assert_eq!(request.amount, Amount::Fraction(Share::from_millionths(500_000)));
    assert_eq!(request.limit, Some(Limit::Fraction(Share::from_millionths(800_000))));
    assert_eq!(request.policy, Some(Policy::BinPack));
    assert_eq!(request.models.names().collect::<Vec<_>>(), ["A100", "H100"]);
}

#[test]
fn filter_and_prioritize_answers_have_the_exact_bytes() {
    let body = data("filter.json");
    let args = ExtenderArgs::parse(&body).unwrap();
    let names = args.nodes.names();
    let [c, a, b] = names[..] else { panic!("the call names three nodes") };
    let answer = ExtenderFilterResult {
        passed: Passed::Names(vec![b]),
        failed_and_unresolvable: vec![
            (c, Rejection::Model.reason()),
            (a, Rejection::Memory { short: MemMib::new(7) }.reason()),
        ],
        ..ExtenderFilterResult::default()
    };
    check_answer(&answer.to_json(), "filter-answer.json");
    let warming =
        ExtenderFilterResult { error: "gpupack is warming up", ..ExtenderFilterResult::default() };
    check_answer(&warming.to_json(), "filter-error-answer.json");
    let scores = [(c, 0), (a, 3), (b, 10)].map(|(host, score)| HostPriority { host, score });
    check_answer(
        &host_priorities_json(scores.into_iter(), args.nodes.are_plain()),
        "prioritize-answer.json",
    );
}

#[test]
fn node_objects_are_echoed_unchanged() {
    let body = data("filter-nodes.json");
    let args = ExtenderArgs::parse(&body).unwrap();
    let NodesArg::Objects(nodes) = &args.nodes else { panic!("objects are sent") };
    assert_eq!(nodes[1].labels.entries(|_| true)["example.com/pool"], "inference");
    assert_eq!(nodes[1].allocatable.entries(|_| true)["cpu"], "63500m");
    let answer = ExtenderFilterResult {
        passed: Passed::Objects(nodes.iter().map(|node| node.raw).collect()),
        ..ExtenderFilterResult::default()
    };
    let (answer, body) =
        (String::from_utf8(answer.to_json()).unwrap(), String::from_utf8(body).unwrap());
    let items = |text: &str| {
        let start = text.rfind(r#""items":"#).unwrap();
        let end = text.find(r#","NodeNames""#).unwrap();
        text[start..end].to_owned()
    };
    assert_eq!(items(&answer), items(&body));
}

#[test]
fn a_bind_body_is_read_and_answered() {
    let args = ExtenderBindingArgs::parse(&data("bind.json")).unwrap();
    assert_eq!(args.pod_name, "infer-7f9c6d5b8-x2kqz");
    assert_eq!(args.pod_namespace, "team-a");
    assert_eq!(args.pod_uid, "0b6e4a52-3c1d-4c5e-9a57-2f6f1f0f8d11");
    assert_eq!(args.node, "gpu-b");
    check_answer(&ExtenderBindingResult::default().to_json(), "bind-answer.json");
}

#[test]
fn every_truncated_body_is_an_error() {
    for name in ["filter.json", "bind.json"] {
        let body = data(name);
        for end in (0..body.len()).step_by(7) {
            let cut = &body[..end];
            assert!(ExtenderArgs::parse(cut).is_err(), "{name} cut at {end}");
            assert!(ExtenderBindingArgs::parse(cut).is_err(), "{name} cut at {end}");
        }
    }
}
