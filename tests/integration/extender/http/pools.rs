//! Pools with slots, shared MIG instances and isolation, as pods and operators see them over HTTP.

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::harness::extender::{Bed, hello, pod, read};

const POOLS: &str = "pools: {gpu-a: {replicas: 4}, gpu-b: {enforcement: mps}}";
const NODES: [&str; 3] = ["gpu-a", "gpu-b", "gpu-c"];

/// A pod with the limits of its container.
fn with_limits(uid: &str, annotations: Value, limits: Value) -> Value {
    let mut pod = pod(uid, annotations);
    pod["spec"]["containers"][0]["resources"] = json!({"limits": limits});
    pod
}

/// Binds a pod that was filtered. Returns the error, or an empty text.
async fn bind(bed: &Bed, uid: &str, node: &str) -> String {
    let body = json!({"PodName": uid, "PodNamespace": "team", "PodUID": uid, "Node": node});
    let (status, answer) = bed.post("/v1/bind", body.to_string()).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    answer["Error"].as_str().expect("a text").to_owned()
}

async fn explain(bed: &Bed, uid: &str) -> String {
    bed.get(&format!("/v1/explain?pod=team/{uid}")).await.1
}

/// The device at a position of a node.
async fn device(bed: &Bed, node: &str, at: usize) -> Value {
    let text = bed.get(&format!("/v1/state?node={node}")).await.1;
    read(text.as_bytes())["nodes"][0]["devices"][at].take()
}

#[tokio::test]
async fn slots_are_allocated_one_by_one_and_rejected_with_a_suggestion() {
    let bed = Bed::warm_with(POOLS).await;
    for at in 0..4 {
        let uid = format!("slot-{at}");
        let queried = with_limits(&uid, json!({}), json!({"nvidia.com/gpu.shared": "1"}));
        let answer = bed.filter(queried, &NODES).await;
        assert_eq!(answer["NodeNames"], json!(["gpu-a"]), "{answer}");
        let refused = &answer["FailedAndUnresolvableNodes"]["gpu-b"];
        assert_eq!(refused, "no replica slots in the node's pool");
        assert_eq!(device(&bed, "gpu-a", 0).await["slots"], json!({"total": 4, "free": 3 - at}));
        assert_eq!(bind(&bed, &uid, "gpu-a").await, "");
        let held = device(&bed, "gpu-a", 0).await;
        assert_eq!(
            held["slots"],
            json!({"total": 4, "free": 3 - at}),
            "the claim became a booking"
        );
        assert_eq!(held["tenants"][at]["allocated"]["memoryMib"], 3_840);
    }
    let fifth = with_limits("fifth", json!({}), json!({"nvidia.com/gpu.shared": "1"}));
    let answer = bed.filter(fifth, &NODES).await;
    assert_eq!(answer["NodeNames"], json!([]));
    let reason = &answer["FailedAndUnresolvableNodes"]["gpu-a"];
    assert_eq!(reason, "insufficient GPU memory");
    let text = explain(&bed, "fifth").await;
    for part in ["3840 MiB of GPU memory", "end team/slot-0 (0.25 GPU): it fits on node gpu-a then"]
    {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert_eq!(bed.state().await[0]["devices"][0]["overallocated"], false);
}

#[tokio::test]
async fn a_fraction_takes_whole_slots_in_a_pool_with_slots() {
    let bed = Bed::warm_with(POOLS).await;
    for (node, share) in [("gpu-a", 500_000), ("gpu-c", 300_000)] {
        let answer = bed.filter(pod(node, json!({"gpu-fraction": "0.3"})), &[node]).await;
        assert_eq!(answer["NodeNames"], json!([node]));
        assert_eq!(bind(&bed, node, node).await, "");
        assert_eq!(device(&bed, node, 0).await["allocated"]["shareMillionths"], share);
    }
}

#[tokio::test]
async fn isolation_is_provided_or_rejected_with_a_suggestion() {
    let bed = Bed::warm_with(POOLS).await;
    let guarded = json!({"gpu-fraction": "0.5", "gpupack.dev/isolation": "memory"});
    let answer = bed.filter(pod("guarded", guarded), &NODES).await;
    assert_eq!(answer["NodeNames"], json!(["gpu-b"]));
    let unprotected = "no memory isolation in the node's pool";
    for node in ["gpu-a", "gpu-c"] {
        assert_eq!(answer["FailedAndUnresolvableNodes"][node], unprotected);
    }
    assert_eq!(bind(&bed, "guarded", "gpu-b").await, "");
    let held = device(&bed, "gpu-b", 0).await;
    assert_eq!(
        (&held["isolation"]["configured"], &held["tenants"][0]["isolation"]["configured"]),
        (&json!("Mps"), &json!("Mps"))
    );
    assert_eq!(held["isolation"]["verification"], "Pending", "no agent has looked");
    let other = device(&bed, "gpu-c", 0).await;
    assert_eq!(other["isolation"], json!({"configured": "None"}), "there is nothing to verify");

    for (uid, isolation, reason, suggestion) in [
        ("small", "memory", unprotected, "configure the nodes' pool with `enforcement`"),
        (
            "part",
            "hardware",
            "no hardware isolation for part of a GPU",
            "`gpu-fraction: \\\"1\\\"` instead of 0.5 GPU: it fits on node gpu-a now",
        ),
    ] {
        let annotations = json!({"gpu-fraction": "0.5", "gpupack.dev/isolation": isolation,
            "gpupack.dev/gpu-model": "T4|L4"});
        let answer = bed.filter(pod(uid, annotations), &NODES).await;
        assert_eq!(answer["FailedAndUnresolvableNodes"]["gpu-c"], reason, "{answer}");
        let text = explain(&bed, uid).await;
        assert!(text.contains(reason) && text.contains(suggestion), "{text}");
    }
}

#[tokio::test]
async fn untracked_memory_blocks_pods_that_require_isolation() {
    let bed = Bed::warm_with(POOLS).await;
    let mut report = hello("gpu-b", "NVIDIA A100-SXM4-80GB", 81_920, 2);
    report["sequence"] = json!(2);
    for (at, used) in [(0, 2_000), (1, 2_000)] {
        report["devices"][at]["usedMib"] = json!(used);
    }
    assert_eq!(bed.report("gpu-b", &report).await.0, StatusCode::OK);
    let annotations =
        |isolation| json!({"gpu-fraction": "0.5", "gpupack.dev/isolation": isolation});
    let answer = bed.filter(pod("wary", annotations("memory")), &["gpu-b"]).await;
    let reason = "GPU has tenants without memory isolation";
    assert_eq!(answer["FailedAndUnresolvableNodes"]["gpu-b"], reason);
    let answer = bed.filter(pod("trusting", annotations("none")), &["gpu-b"]).await;
    assert_eq!(answer["NodeNames"], json!(["gpu-b"]));
}

/// `gpu-a` as an A30 with these instances.
fn a30(profiles: &[&str]) -> Value {
    let mut report = hello("gpu-a", "NVIDIA A30", 24_576, 1);
    report["agent"] = json!(profiles.concat());
    report["inventory"][0]["kind"] = json!("MigParent");
    for (at, profile) in profiles.iter().enumerate() {
        let uuid = format!("MIG-{at}");
        let inventory = report["inventory"].as_array_mut().expect("a list");
        inventory.push(json!({"id": uuid, "index": 0, "model": "NVIDIA A30", "memoryMib": 5_952,
            "kind": "MigInstance", "parentId": "GPU-gpu-a-0", "migProfile": profile, "healthy": true}));
        let uses = report["devices"].as_array_mut().expect("a list");
        uses.push(json!({"id": uuid, "usedMib": 0, "healthy": true, "processes": []}));
    }
    report
}

#[tokio::test]
async fn mig_slots_and_whole_instances_share_one_ledger() {
    let bed = Bed::warm_with("pools: {gpu-a: {replicas: 2}}").await;
    let (status, reply) = bed.report("gpu-a", &a30(&["1g.6gb", "1g.6gb", "2g.12gb"])).await;
    assert_eq!(status, StatusCode::OK, "{reply}");
    let slot = |uid| with_limits(uid, json!({}), json!({"nvidia.com/gpu.shared": "1"}));
    let whole = |uid| with_limits(uid, json!({}), json!({"nvidia.com/mig-1g.6gb": "1"}));
    let half = pod("half", json!({"gpu-fraction": "0.5", "gpupack.dev/gpu-model": "MIG 1g.6gb"}));
    for (uid, queried) in [("slot", slot("slot")), ("half", half), ("whole", whole("whole"))] {
        let answer = bed.filter(queried, &NODES[..1]).await;
        assert_eq!(answer["NodeNames"], json!(["gpu-a"]), "{uid}: {answer}");
        assert_eq!(bind(&bed, uid, "gpu-a").await, "");
    }
    let answer = bed.filter(whole("one-more"), &NODES[..1]).await;
    assert_eq!(answer["NodeNames"], json!([]), "both are in use: {answer}");
    let summary = read(bed.get("/v1/summary").await.1.as_bytes());
    let gpus = summary["nodes"][0]["gpus"].as_array().expect("a list");
    let flags: Vec<&Value> = gpus.iter().map(|gpu| &gpu[2]).collect();
    assert_eq!(flags, [4, 16, 16, 16], "a divided GPU and three MIG instances: {summary}");
    let two = device(&bed, "gpu-a", 3).await;
    assert_eq!(
        (&two["migProfile"], &two["computeMillionths"]),
        (&json!("2g.12gb"), &json!(500_000))
    );
    let allocated: u64 = {
        let node = &bed.state().await[0];
        let devices = node["devices"].as_array().expect("a list").clone();
        devices
            .iter()
            .map(|device| device["allocated"]["memoryMib"].as_u64().expect("a number"))
            .sum()
    };
    assert_eq!(allocated, 2 * 2_976 + 5_952);
}

#[tokio::test]
async fn instances_beyond_their_gpu_get_no_pod() {
    let bed = Bed::warm_with("").await;
    for (profiles, fits) in [(["2g.12gb", "2g.12gb"], true), (["4g.24gb", "2g.12gb"], false)] {
        let (status, reply) = bed.report("gpu-a", &a30(&profiles)).await;
        assert_eq!(status, StatusCode::OK, "a report is not refused for it: {reply}");
        let queried = with_limits("p", json!({}), json!({"nvidia.com/mig-2g.12gb": "1"}));
        let answer = bed.filter(queried, &NODES[..1]).await;
        assert_eq!(answer["NodeNames"] == json!(["gpu-a"]), fits, "{profiles:?}: {answer}");
        assert_eq!(device(&bed, "gpu-a", 1).await["health"] == "Healthy", fits);
        bed.app.settle_pod(&wire::ids::PodUid::new("p"));
    }
}

#[tokio::test]
async fn several_gpus_are_allocated_near_each_other() {
    let bed = Bed::warm().await;
    for (node, numa_nodes) in [("gpu-a", [0, 1, 0, 1]), ("gpu-b", [0, 1, 2, 3])] {
        let mut report = hello(node, "NVIDIA L40S", 46_068, 4);
        report["agent"] = json!("second");
        for (at, numa_node) in numa_nodes.into_iter().enumerate() {
            report["inventory"][at]["numaNode"] = json!(numa_node);
        }
        if node == "gpu-b" {
            report["inventory"][1]["neighbors"] = json!([{"id": "GPU-gpu-b-3", "links": 4}]);
        }
        let (status, answer) = bed.report(node, &report).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
    }
    let mut nodes = vec!["gpu-a", "gpu-b"];
    for (uid, devices) in
        [("linked", ["GPU-gpu-b-1", "GPU-gpu-b-3"]), ("beside", ["GPU-gpu-a-0", "GPU-gpu-a-2"])]
    {
        let node = if uid == "linked" { "gpu-b" } else { "gpu-a" };
        let pair = json!({"gpu-fraction": "1", "gpu-fraction-num-devices": "2"});
        let queried = pod(uid, pair);
        let answer = bed.filter(queried.clone(), &nodes).await;
        assert_eq!(answer["NodeNames"], json!(nodes), "{answer}");
        let body = json!({"Pod": queried, "NodeNames": nodes});
        let (_, scores) = bed.post("/v1/prioritize", body.to_string()).await;
        let best =
            scores.as_array().and_then(|all| all.iter().max_by_key(|it| it["Score"].as_i64()));
        assert_eq!(best.map(|it| &it["Host"]), Some(&json!(node)), "{scores}");
        assert_eq!(bind(&bed, uid, node).await, "");
        let explained = explain(&bed, uid).await;
        assert!(devices.iter().all(|device| explained.contains(device)), "{explained}");
        nodes.retain(|other| *other != node);
    }
}

#[tokio::test]
async fn a_device_owned_by_kubelet_is_rejected_with_its_own_reason() {
    let bed = Bed::warm().await;
    let mut report = hello("gpu-a", "Tesla T4", 15_360, 1);
    (report["agent"], report["devices"][0]["healthy"]) = (json!("second"), json!(false));
    for (fault, reason, suggestion) in [
        ("KubeletOwned", "every suitable GPU is owned by kubelet", "a device plugin"),
        ("Xid", "no healthy suitable GPU", "1 GPU that would take it is unhealthy"),
    ] {
        report["devices"][0]["fault"] = json!(fault);
        report["sequence"] = json!(report["sequence"].as_u64().map(|before| before + 1));
        let (status, answer) = bed.report("gpu-a", &report).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        assert_eq!(device(&bed, "gpu-a", 0).await["fault"], fault);
        let half = json!({"gpu-fraction": "0.5", "gpupack.dev/gpu-model": "T4"});
        let answer = bed.filter(pod("half", half), &NODES).await;
        assert_eq!(answer["FailedAndUnresolvableNodes"]["gpu-a"], reason, "{answer}");
        let text = explain(&bed, "half").await;
        assert!(text.contains(reason) && text.contains(suggestion), "{text}");
    }
}

/// The report of `gpu-a` with a GPU that has no memory of its own.
fn gb10(fault: &str) -> Value {
    let mut report = hello("gpu-a", "NVIDIA GB10", 0, 1);
    report["agent"] = json!(format!("agent-{fault}"));
    report["inventory"][0]["healthy"] = json!(false);
    let uuid = &report["inventory"][0]["id"];
    report["devices"] = json!([{"id": uuid, "healthy": false, "fault": fault, "processes": []}]);
    report
}

#[tokio::test]
async fn a_gpu_without_memory_of_its_own_takes_pods_where_its_model_has_a_size() {
    let shown = |device: &Value| {
        let keys = ["health", "fault", "capacityMib", "capacityConfigured", "usedMib"];
        keys.map(|key| device[key].clone())
    };
    let null = Value::Null;
    let ill = |fault: &str, mib: u64| {
        [
            json!("Unhealthy"),
            json!(fault),
            json!(mib),
            if mib > 0 { json!(true) } else { null.clone() },
            null.clone(),
        ]
    };
    let bed = Bed::warm_with("models: {H100: {memory_mib: 100000}}").await;
    assert_eq!(bed.report("gpu-a", &gb10("NoMemory")).await.0, StatusCode::OK);
    assert_eq!(shown(&device(&bed, "gpu-a", 0).await), ill("NoMemory", 0));
    for request in ["0.5", "1"] {
        let answer = bed.filter(pod("p", json!({"gpu-fraction": request})), &NODES[..1]).await;
        assert_eq!(answer["NodeNames"], json!([]), "{request} without a size: {answer}");
    }

    let bed = Bed::warm_with("models: {GB10: {memory_mib: 100000}}").await;
    for fault in ["Xid", "KubeletOwned", "UnknownUse"] {
        assert_eq!(bed.report("gpu-a", &gb10(fault)).await.0, StatusCode::OK);
        let seen = shown(&device(&bed, "gpu-a", 0).await);
        let health = if fault == "KubeletOwned" { fault } else { "Unhealthy" };
        assert_eq!(
            (&seen[0], &seen[1]),
            (&json!(health), &json!(fault)),
            "a size ends no other fault"
        );
    }
    assert_eq!(bed.report("gpu-a", &gb10("NoMemory")).await.0, StatusCode::OK);
    let well = [json!("Healthy"), null.clone(), json!(100_000), json!(true), null];
    assert_eq!(shown(&device(&bed, "gpu-a", 0).await), well);
    for (uid, annotations, mib) in [
        ("quarter", json!({"gpu-fraction": "0.25"}), 25_000),
        ("memory", json!({"gpu-memory": "30000"}), 55_000),
    ] {
        let answer = bed.filter(pod(uid, annotations), &NODES[..1]).await;
        assert_eq!(answer["NodeNames"], json!(["gpu-a"]), "{uid}: {answer}");
        assert_eq!(bind(&bed, uid, "gpu-a").await, "");
        assert_eq!(device(&bed, "gpu-a", 0).await["allocated"]["memoryMib"], mib);
    }
    let answer = bed.filter(pod("half", json!({"gpu-fraction": "0.5"})), &NODES[..1]).await;
    assert_eq!(answer["NodeNames"], json!([]), "shares are counted by that size: {answer}");
    // Its next report has no inventory, and nothing else changes.
    let bed = Bed::warm_with("models: {GB10: {memory_mib: 100000}}").await;
    let (_, reply) = bed.report("gpu-a", &gb10("NoMemory")).await;
    let mut next = gb10("NoMemory");
    (next["session"], next["sequence"]) = (reply["session"].clone(), json!(2));
    next.as_object_mut().expect("a report").remove("inventory");
    assert_eq!(bed.report("gpu-a", &next).await.0, StatusCode::OK);
    let answer = bed.filter(pod("whole", json!({"gpu-fraction": "1"})), &NODES[..1]).await;
    assert_eq!(answer["NodeNames"], json!(["gpu-a"]), "{answer}");
    bed.app.ledger.audit().expect("sound sums");
}

#[tokio::test]
async fn multiprocessors_that_the_driver_lists_win_over_the_table() {
    let bed = Bed::warm_with("").await;
    let mut report = a30(&["1g.6gb"]);
    let shown = async |report: &Value| {
        assert_eq!(bed.report("gpu-a", report).await.0, StatusCode::OK);
        device(&bed, "gpu-a", 1).await["computeMillionths"].clone()
    };
    assert_eq!(shown(&report).await, 250_000, "14 of 56 by the table");
    // As on an H100 with PCIe, which has 114 in place of 132.
    report["agent"] = json!("another");
    report["inventory"][0]["multiprocessors"] = json!(50);
    report["inventory"][1]["smCount"] = json!(14);
    assert_eq!(shown(&report).await, 280_000);
}
