use super::*;
use proptest::prelude::*;

const POD: &str = r#"{"metadata":{"name":"p","namespace":"n","uid":"u"}}"#;

#[test]
fn field_names_are_read_in_any_casing_and_null_is_absent() {
    for body in [
        format!(r#"{{"Pod":{POD},"Nodes":null,"NodeNames":["a","b"]}}"#),
        format!(r#"{{"pod":{POD},"nodenames":["a","b"]}}"#),
        format!(r#"{{"NODENAMES":["a","\u0062"],"extra":{{"x":[1]}},"POD":{POD}}}"#),
        format!(r#" {{"nodeNames":["a","b"],"pod":{POD},"nodes":{{"items":null}}}} "#),
        format!(
            r#"{{"pod":{POD},"nodeNames":null,"nodes":{{"items":[{{"metadata":{{"name":"a"}}}},{{"metadata":{{"name":"b","labels":null}},"status":null}}]}}}}"#
        ),
    ] {
        let args = ExtenderArgs::parse(body.as_bytes()).expect(&body);
        assert_eq!(args.nodes.names(), ["a", "b"], "{body}");
        assert_eq!(args.seen_pod().unwrap().pod.to_string(), "n/p");
    }
    let none = format!(r#"{{"Pod":{POD},"Nodes":null,"NodeNames":null}}"#);
    assert!(ExtenderArgs::parse(none.as_bytes()).unwrap().nodes.names().is_empty());
}

#[test]
fn names_without_escapes_are_borrowed() {
    let body = format!(r#"{{"Pod":{POD},"NodeNames":["a","\u0062"]}}"#);
    let args = ExtenderArgs::parse(body.as_bytes()).unwrap();
    let NodesArg::Names(names) = &args.nodes else { panic!("names were given") };
    assert!(matches!(names[0], Cow::Borrowed("a")));
    assert!(matches!(&names[1], Cow::Owned(name) if name == "b"));
}

#[test]
fn bad_bodies_are_clear_errors() {
    let deep = |levels: usize| "[".repeat(levels) + &"]".repeat(levels);
    let names = r#""NodeNames":["a"]"#;
    for (body, reason, part) in [
        (String::new(), "json", "EOF"),
        ("null".into(), "json", "expected an object"),
        ("[]".into(), "json", "expected an object"),
        (format!(r#"{{{names}}}"#), "missing", "`Pod`"),
        (format!(r#"{{"Pod":null,{names}}}"#), "missing", "`Pod`"),
        (format!(r#"{{"Pod":{POD},{names}"#), "json", "EOF"),
        (format!(r#"{{"Pod":{POD},{names}}} {{}}"#), "json", "trailing"),
        (format!(r#"{{"Pod":{POD},"pod":{POD},{names}}}"#), "json", "duplicate field `Pod`"),
        (format!(r#"{{"Pod":{POD},{names},"nodenames":[]}}"#), "json", "duplicate field"),
        (format!(r#"{{"Pod":{POD},"NodeNames":[7]}}"#), "json", "string"),
        (format!(r#"{{"Pod":{POD},"NodeNames":"a"}}"#), "json", "sequence"),
        (format!(r#"{{"Pod":{POD},"NodeNames":{}}}"#, deep(200)), "json", "expected a string"),
        (format!(r#"{{"Pod":{},{names}}}"#, deep(100_000)), "depth", "127"),
        (format!(r#"{{"Pod":{POD},"Nodes":{}}}"#, deep(100_000)), "depth", "127"),
        (format!(r#"{{"Pod":{POD},{names},"x":{}}}"#, deep(100_000)), "depth", "127"),
        (format!(r#"{{"Pod":{POD},"Nodes":{{"items":[{{}}]}}}}"#), "json", "metadata"),
    ] {
        let error = ExtenderArgs::parse(body.as_bytes()).map(|_| ()).unwrap_err();
        let start: String = body.chars().take(80).collect();
        assert_eq!(error.reason(), reason, "{start}: {error}");
        assert!(error.to_string().contains(part), "{start}: {error}");
    }
    let error = ExtenderArgs::parse(b"{\"Pod\xff\":1}").map(|_| ()).unwrap_err();
    assert_eq!(error, ProtocolError::Encoding { offset: 5 });
    let args = format!(r#"{{"Pod":{{"metadata":{{}}}},{names}}}"#);
    let error = ExtenderArgs::parse(args.as_bytes()).unwrap().seen_pod().unwrap_err();
    assert_eq!(error.reason(), "pod");
}

#[test]
fn brackets_within_texts_are_no_nesting() {
    let body = format!(r#"{{"Pod":{POD},"NodeNames":[],"x":"{}\"["}}"#, "[".repeat(500));
    assert!(ExtenderArgs::parse(body.as_bytes()).is_ok());
}

#[test]
fn a_bind_body_needs_all_four_fields() {
    let full = r#"{"podname":"p","PodNamespace":"n","POdUId":"u","Node":"a","More":[{}]}"#;
    let args = ExtenderBindingArgs::parse(full.as_bytes()).unwrap();
    assert_eq!((args.pod_name.as_str(), args.node.as_str()), ("p", "a"));
    for (body, part) in [
        (r#"{"PodName":"p","PodNamespace":"n","PodUID":"","Node":"a"}"#, "`PodUID`"),
        (r#"{"PodName":"p","PodNamespace":null,"PodUID":"u","Node":"a"}"#, "`PodNamespace`"),
        (r#"{"PodName":"p","PodNamespace":"n","PodUID":"u"}"#, "`Node`"),
        (r#"{"PodName":"p","podname":"q"}"#, "duplicate"),
        (r#"{"PodName":7}"#, "string"),
    ] {
        let error = ExtenderBindingArgs::parse(body.as_bytes()).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn answers_have_gos_field_names() {
    let answer = ExtenderFilterResult {
        passed: Passed::Names(vec!["b"]),
        failed_and_unresolvable: vec![("a", "no \"room\"")],
        ..ExtenderFilterResult::default()
    };
    assert_eq!(
        String::from_utf8(answer.to_json()).unwrap(),
        r#"{"Nodes":null,"NodeNames":["b"],"FailedNodes":{},"FailedAndUnresolvableNodes":{"a":"no \"room\""},"Error":""}"#
    );
    assert_eq!(
        String::from_utf8(host_priorities_json(&[HostPriority { host: "b", score: -1 }])).unwrap(),
        r#"[{"Host":"b","Score":-1}]"#
    );
    assert_eq!(host_priorities_json(&[]), b"[]");
    assert_eq!(ExtenderBindingResult::default().to_json(), br#"{"Error":""}"#);
}

#[test]
fn node_objects_come_back_as_they_went() {
    let node = r#"{ "metadata": {"name":"a","labels":{"k":"v"},"managedFields":[{}]}, "status":{"allocatable":{"cpu":"4"}} }"#;
    let body = format!(r#"{{"Pod":{POD},"Nodes":{{"metadata":{{}},"items":[{node}]}}}}"#);
    let args = ExtenderArgs::parse(body.as_bytes()).unwrap();
    let NodesArg::Objects(nodes) = &args.nodes else { panic!("objects were given") };
    assert_eq!((nodes[0].labels["k"].as_str(), nodes[0].allocatable["cpu"].as_str()), ("v", "4"));
    let answer = ExtenderFilterResult {
        passed: Passed::Objects(vec![nodes[0].raw]),
        ..ExtenderFilterResult::default()
    };
    let answer = String::from_utf8(answer.to_json()).unwrap();
    assert!(answer.starts_with(&format!(r#"{{"Nodes":{{"items":[{node}]}},"NodeNames":null,"#)));
}

proptest! {
    #[test]
    fn no_body_makes_the_parsers_panic(
        body in prop_oneof![
            proptest::collection::vec(any::<u8>(), 0..60),
            "[\\[\\]{}\",:a-z0-9PN ]{0,60}".prop_map(String::into_bytes),
            r#"\{"Pod":.{0,20},"NodeNames":.{0,20}\}"#.prop_map(String::into_bytes),
        ],
    ) {
        if let Ok(args) = ExtenderArgs::parse(&body) {
            let _ = args.seen_pod();
        }
        let _ = ExtenderBindingArgs::parse(&body);
    }
}
