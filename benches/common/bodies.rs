//! Request bodies as kube-scheduler sends them.

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

/// A Pod object of 4.4 KB as kube-scheduler 1.36 sends it, with `@…@` where pods differ.
pub(crate) const POD: &str = include_str!("../../src/cli/demo/pod.json.in");

/// Orders of the nodes, one per body: kube-scheduler's differs from call to call.
const ORDERS: usize = 16;

/// What the pods of the bodies request.
const SIZES: [&str; 6] = ["0.1", "0.2", "0.25", "0.5", "0.75", "1"];

/// Bodies that name all of `names`, each for another pod and in another order.
pub(crate) fn bodies(names: &[String]) -> Vec<Vec<u8>> {
    bodies_of(names, |number| format!(r#""gpu-fraction":"{}""#, SIZES[number % SIZES.len()]))
}

/// The same for pods with such annotations.
pub(crate) fn bodies_of(names: &[String], annotations: impl Fn(usize) -> String) -> Vec<Vec<u8>> {
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let mut names = names.to_vec();
    let body = |number: usize| {
        names.shuffle(&mut rng);
        let list = serde_json::to_string(&names).expect("a list of texts");
        let pod = pod_json(number, &annotations(number));
        format!(r#"{{"Pod":{pod},"Nodes":null,"NodeNames":{list}}}"#).into_bytes()
    };
    (0..ORDERS).map(body).collect()
}

fn pod_json(number: usize, annotations: &str) -> String {
    filled(POD, |piece| match piece {
        "name" => format!("infer-{number}"),
        "uid" => format!("0b6e0000-0000-4000-8000-{number:012}"),
        "version" => "8123".to_owned(),
        "annotations" => format!(",{annotations}"),
        other => usual(other).to_owned(),
    })
}

/// A template with these values in place of its `@…@`.
pub(crate) fn filled(template: &str, value: impl Fn(&str) -> String) -> String {
    let pieces = template.trim_end().split('@').enumerate();
    pieces.map(|(at, piece)| if at % 2 == 0 { piece.to_owned() } else { value(piece) }).collect()
}

/// What a piece is where pods do not differ in it.
pub(crate) fn usual(piece: &str) -> &'static str {
    match piece {
        "workload" => "infer",
        "namespace" => "team-a",
        "created" => "2026-11-21T00:00:00Z",
        "devices" | "resize" => "",
        "cpu" => "1000",
        "memory" => "4096",
        "sign" => "@",
        unknown => panic!("the template names the value `{unknown}`"),
    }
}
