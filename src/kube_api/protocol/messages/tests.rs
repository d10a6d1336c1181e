use proptest::prelude::*;

use super::*;

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
        assert_eq!(args.pod.pod.to_string(), "n/p");
    }
    let none = format!(r#"{{"Pod":{POD},"Nodes":null,"NodeNames":null}}"#);
    assert!(ExtenderArgs::parse(none.as_bytes()).unwrap().nodes.names().is_empty());
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
    let error = ExtenderArgs::parse(args.as_bytes()).map(|_| ()).unwrap_err();
    assert_eq!(error.reason(), "pod");
}

#[test]
fn an_error_does_not_repeat_a_large_body() {
    let long = "Z".repeat(1 << 20);
    for body in [
        format!("\"{long}\""),
        format!(r#"{{"Pod":{POD},"NodeNames":"{long}"}}"#),
        format!(r#"{{"Pod":{{"spec":{{"priority":"{long}"}}}},"NodeNames":[]}}"#),
        format!(r#"{{"Pod":{{"metadata":{{"creationTimestamp":"{long}"}}}},"NodeNames":[]}}"#),
        format!(r#"{{"Pod":{POD},"Nodes":{{"items":"{long}"}}}}"#),
        format!(r#"{{"Pod":{POD},"Nodes":{{"items":[{{"metadata":"{long}"}}]}}}}"#),
    ] {
        let error = ExtenderArgs::parse(body.as_bytes()).map(|_| ()).unwrap_err().to_string();
        assert!(error.len() < 400 && error.contains(" at line 1 column "), "{error:.500}");
    }
    let error = ExtenderBindingArgs::parse(format!("\"{long}\"").as_bytes()).unwrap_err();
    assert!(error.to_string().len() < 400);
}

#[test]
fn brackets_in_strings_do_not_count_as_nesting() {
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
    for (first, shown, are_plain) in [("a", "a", true), ("a", "a", false), ("a\"", "a\\\"", false)]
    {
        let answer = ExtenderFilterResult {
            failed_and_unresolvable: vec![(first, "\n"), ("b", "no"), ("c", "\n")],
            error: "\t",
            are_plain,
            ..ExtenderFilterResult::default()
        };
        let refused = format!(r#"{{"{shown}":"\n","b":"no","c":"\n"}}"#);
        let expected = format!(
            r#"{{"Nodes":null,"NodeNames":null,"FailedNodes":{{}},"FailedAndUnresolvableNodes":{refused},"Error":"\t"}}"#
        );
        assert_eq!(String::from_utf8(answer.to_json()).unwrap(), expected);
    }
    assert_eq!(
        String::from_utf8(host_priorities_json(
            [HostPriority { host: "b", score: -1 }].into_iter(),
            true,
        ))
        .unwrap(),
        r#"[{"Host":"b","Score":-1}]"#
    );
    assert_eq!(host_priorities_json([].into_iter(), false), b"[]");
    assert_eq!(ExtenderBindingResult::default().to_json(), br#"{"Error":""}"#);
}

#[test]
fn node_objects_are_returned_unchanged() {
    let node = r#"{ "metadata": {"name":"a","labels":{"k":"v"},"managedFields":[{}]}, "status":{"allocatable":{"cpu":"4"}} }"#;
    let body = format!(r#"{{"Pod":{POD},"Nodes":{{"metadata":{{}},"items":[{node}]}}}}"#);
    let args = ExtenderArgs::parse(body.as_bytes()).unwrap();
    let NodesArg::Objects(nodes) = &args.nodes else { panic!("objects were given") };
    let (labels, amounts) =
        (nodes[0].labels.entries(|_| true), nodes[0].allocatable.entries(|key| key == "cpu"));
    assert_eq!((labels["k"].as_str(), amounts["cpu"].as_str()), ("v", "4"));
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
        let _ = ExtenderArgs::parse(&body);
        let _ = ExtenderBindingArgs::parse(&body);
    }
}

/// A list of names as any client may send it, most of them plain.
fn name_list() -> impl Strategy<Value = String> {
    let name = prop_oneof![
        8 => "[a-z0-9.-]{1,40}".prop_map(|name| format!("\"{name}\"")),
        1 => Just(r#""a\u0062""#.to_owned()),
        1 => Just(r#""a,b]}""#.to_owned()),
        1 => Just("\"é\"".to_owned()),
        1 => Just("7".to_owned()),
        1 => Just("\"a\tb\"".to_owned()),
        1 => Just("\"a".to_owned()),
    ];
    proptest::collection::vec(name, 0..12).prop_map(|names| names.join(","))
}

proptest! {
    // What kube-scheduler sends takes the fast path; a blank makes the same body take the slow one.
    #[test]
    fn the_fast_parser_reads_the_same_as_the_full_parser(
        list in name_list(),
        head in prop_oneof![
            6 => Just(format!(r#"{{"Pod":{POD},"Nodes":null"#)),
            1 => Just(format!(r#"{{"Pod":{POD},"nodenames":null"#)),
            1 => Just(format!(r#"{{"Pod":{POD},"Nodes":{{"items":[]}}"#)),
            1 => Just(format!(r#"{{"x":{{"y":1,"NodeNames":["a"]}},"Pod":{POD}"#)),
            1 => Just(format!(r#"{{"x":",\"NodeNames\":[","Pod":{POD}"#)),
            1 => Just(format!(r#"{{"Pod":{POD},"Pod":{POD}"#)),
            1 => Just(format!(r#"{{"Pod":{POD},"x":{}{}"#, "[".repeat(200), "]".repeat(200))),
            1 => Just(format!(r#"{{"Pod":{{"x":{POD}"#)),
            1 => Just(r#"{"Pod":{"x":{"y":1,"Nodes":null,"NodeNames":["a"]},"Nodes":null"#.to_owned()),
            1 => Just(r#"{"Pod":{"x":",\"Nodes\":null,\"NodeNames\":["},"Nodes":null"#.to_owned()),
            1 => Just(r#"{"Pod":7,"Nodes":null"#.to_owned()),
            1 => Just(format!(r#"{{"Pod":{{"metadata":{{"name":"p","namespace":"n","uid":"u"}},"x":{}{}}},"Nodes":null"#, "[".repeat(130), "]".repeat(130))),
            1 => Just(format!(r#"{{"Pod":{POD},"#)),
            1 => Just(r#"{"Nodes":null"#.to_owned()),
        ],
        tail in prop_oneof![
            6 => Just("]}"), 1 => Just("]}\n"), 1 => Just("]} {}"), 1 => Just("]"), 1 => Just("]}}"),
            1 => Just(r#"],"Nodes":null}"#), 1 => Just(r#"],"nodeNames":[]}"#),
        ],
    ) {
        let read = |colon: &str| {
            let body = format!("{head},\"NodeNames\"{colon}[{list}{tail}");
            let args = ExtenderArgs::parse(body.as_bytes());
            args.map(|args| {
                let names: Vec<String> = args.nodes.names().into_iter().map(str::to_owned).collect();
                (names, args.pod, matches!(args.nodes, NodesArg::Names(_)))
            })
            .map_err(|error| error.reason())
        };
        prop_assert_eq!(read(":"), read(": "));
    }

    #[test]
    fn scores_are_written_as_json(entries in proptest::collection::vec((prop_oneof!["[a-z.0-9]{0,12}", ".{0,12}"], any::<i64>()), 0..6)) {
        let priorities = entries.iter().map(|(host, score)| HostPriority { host, score: *score });
        let written = host_priorities_json(priorities.clone(), false);
        if entries.iter().all(|(host, _)| to_json(host).len() == host.len() + 2) {
            prop_assert_eq!(&host_priorities_json(priorities, true), &written);
        }
        let read: Vec<serde_json::Value> = serde_json::from_slice(&written).unwrap();
        let wanted: Vec<_> =
            entries.iter().map(|(host, score)| serde_json::json!({"Host": host, "Score": score})).collect();
        prop_assert_eq!(read, wanted);
    }
}

#[test]
fn bodies_of_kube_scheduler_use_the_fast_parser() {
    let long = "a-name.of-some-length".repeat(9);
    let names: [&str; 6] = [&long, "b-1.x", "", "12345678", "1234567", "é"];
    let list = serde_json::to_string(&names).unwrap();
    let body = format!(r#"{{"Pod":{POD},"Nodes":null,"NodeNames":{list}}}"#);
    let (pod, found) = quick_parts(&body).unwrap();
    assert_eq!((pod, found.iter().collect::<Vec<_>>()), (POD, names.to_vec()));
    assert_eq!((found.len(), found.iter().nth(1)), (6, Some("b-1.x")));
    assert!(quick_parts(&body.replace("b-1", "\\u0061")).is_none());
}
