//! What holds pods to their memory is reported as verified only when the driver says so.

use std::time::Duration;

use serde_json::{Value, json};

use super::loops::Loops;
use crate::harness::agent::extender::Extender;
use crate::harness::agent::world::{POD, World, a100, sample, with};

const SCOPE: &str =
    "/kubepods.slice/kubepods-pod0d5ab2f3_58e1_4f5c_9a4b_1c7d3c1e8f00.slice/crio-1.scope";

/// A GPU with two processes of one pod, and these limits: control group and MiB.
fn scenario(list: &str, limits: &[(&str, u64)]) -> Value {
    let process = |pid: u32| json!({"pid": pid, "used_mib": 500, "lists": [list]});
    let limits = limits.iter().map(|(group, mib)| (format!("/sys/fs/cgroup{group}"), json!(mib)));
    let gpu = with(a100("GPU-a"), "processes", json!([process(10), process(11)]));
    json!({"gpus": [with(gpu, "memory_limits", limits.collect::<serde_json::Map<_, _>>().into())],
           "journal": true})
}

/// A world in which the processes have these control groups.
fn world(scenario: &Value, groups: [&str; 2]) -> World {
    let world = World::new(scenario);
    for (pid, group) in [10, 11].into_iter().zip(groups) {
        world.process(pid, &format!("0::{group}\n"));
    }
    world
}

/// What is reported of the pod: its limit, whether it is known to have none, and whether it is a client
/// of MPS.
fn told(world: &World) -> (Option<u64>, bool, bool) {
    let sample = sample(&mut world.probe()).unwrap();
    match &sample.uses[0].tenants[..] {
        [] => (None, false, false),
        [only] => {
            assert_eq!(only.pod_uid, POD);
            (only.limit_mib, only.is_unlimited, only.is_mps_client)
        }
        more => panic!("{more:?}"),
    }
}

#[test]
fn a_limit_counts_when_it_holds_every_process_of_the_pod() {
    let other = SCOPE.replace("crio-1", "crio-2");
    let inner = format!("{SCOPE}/container");
    for (limits, groups, limit, is_unlimited) in [
        (&[][..], [SCOPE, SCOPE], None, true),
        (&[(SCOPE, 1_000)], [SCOPE, SCOPE], Some(1_000), false),
        (&[(SCOPE, 1_000)], [SCOPE, &inner], Some(1_000), false),
        (&[(SCOPE, 1_000), (&inner, 400)], [&inner, &inner], Some(400), false),
        (&[(SCOPE, 1_000)], [SCOPE, &other], None, true),
        (&[(SCOPE, 1_000), (&other, 500)], [SCOPE, &other], Some(1_500), false),
        // In one of two groups only one process is held; the other could take all.
        (&[(&inner, 400)], [SCOPE, &inner], None, true),
        // More than any GPU has is no limit; of a path is not known where it lies.
        (&[(SCOPE, 1 << 40)], [SCOPE, SCOPE], None, true),
        (&[(SCOPE, 1_000)], [&format!("/../..{SCOPE}"), SCOPE], None, false),
    ] {
        let world = world(&scenario("compute", limits), groups);
        assert_eq!(told(&world), (limit, is_unlimited, false), "{limits:?} {groups:?}");
    }
}

#[test]
fn what_cannot_be_read_back_is_not_verified() {
    let limits = [(SCOPE, 1_000)];
    let scenario = scenario("mps", &limits);
    let full = world(&scenario, [SCOPE; 2]);
    assert_eq!(told(&full), (Some(1_000), false, true));
    assert!(sample(&mut full.probe()).unwrap().inventory[0].can_limit_memory);
    let older = world(&scenario, [SCOPE; 2]).without("nvmlDeviceGetMemoryLimits_v1");
    assert_eq!(told(&older), (None, false, true), "an MPS client by itself proves nothing");
    assert!(!sample(&mut older.probe()).unwrap().inventory[0].can_limit_memory);
    for code in [1, 2, 3, 4, 13, 15, 25, 999] {
        let failures = json!({"nvmlDeviceGetMemoryLimits_v1": code});
        let failing = with(scenario.clone(), "failures", failures);
        assert_eq!(told(&world(&failing, [SCOPE; 2])), (None, false, true), "code {code}");
    }
    let first = world(&scenario, [SCOPE; 2]);
    first.process(11, &format!("5:memory:{SCOPE}\n"));
    assert_eq!(told(&first), (None, false, true), "version 1 of control groups");
}

#[test]
fn the_extender_shows_what_is_verified_beside_what_is_intended() {
    let world = world(&scenario("compute", &[(SCOPE, 1_000)]), [SCOPE; 2]);
    let extender = Extender::start();
    extender.book(POD, "GPU-a", 1_000);
    let _loops = Loops::start(&world, &extender, Duration::from_millis(100));
    let wait = |intended: &str, verified: &str| {
        extender.until(&format!("{intended}, {verified}"), |node| {
            let tenant = &node["devices"][0]["tenants"][0];
            let is = |key: &str, mode: &str| {
                let shown = tenant["isolation"][key].as_str();
                shown.is_some_and(|shown| shown.eq_ignore_ascii_case(mode))
            };
            (is("configured", intended) && is("verified", verified)).then_some(())
        });
        let count = |standing: &str, mode: &str| {
            let labels = format!("{{protection=\"{mode}\",standing=\"{standing}\"}}");
            extender.metric(&format!("gpupack_tenants{labels}"))
        };
        assert_eq!((count("intended", intended), count("verified", verified)), (1, 1));
    };
    wait("driver", "driver");
    assert_eq!(extender.node()["devices"][0]["canLimitMemory"], true);
    // A limit that was widened below us no longer holds anybody to his share.
    world.play(&scenario("compute", &[(SCOPE, 1_001)]));
    wait("none", "none");
    world.play(&scenario("mps", &[]));
    wait("mps", "none");
}
