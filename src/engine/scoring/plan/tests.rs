//! Where requests fit, which devices they get, and why they are refused.

use expect_test::{Expect, expect};

use super::*;
use crate::model::device_state::Hold;
use crate::model::policy::Policy;
use crate::scoring::node_fixture;
use wire::units::{HostAmount, MemMib, MilliCpu, Timestamp};

fn answer(node_text: &str, request_text: &str, policy: Policy, mix_text: &str) -> String {
    let (node, classes) = node_fixture::node(node_text);
    let compiled = node_fixture::compiled_request(request_text, &classes);
    let mix = node_fixture::compiled(mix_text, &node, &classes);
    let found = evaluate(&node, &compiled, &Strategy::Policy(policy), &mix, HoldRule::Respected);
    match found {
        Err(rejection) => format!("{rejection:?}"),
        Ok(place) => {
            let placed = placement(&node, &place);
            assert!(still_fits(&node, &compiled, &placed), "what was just found fits");
            let names: Vec<_> = placed.devices.iter().map(|device| device.id.as_str()).collect();
            names.join("+")
        }
    }
}

/// Where only one placement exists, all policies give the same answer.
#[expect(clippy::needless_pass_by_value, reason = "an expectation is written at the call")]
fn check(node: &str, request: &str, expected: Expect) {
    for policy in Policy::ALL {
        expected.assert_eq(&answer(node, request, policy, "1 fraction=0.5"));
    }
}

#[expect(clippy::needless_pass_by_value, reason = "an expectation is written at the call")]
fn check_policy(node: &str, request: &str, policy: Policy, expected: Expect) {
    expected.assert_eq(&answer(node, request, policy, "1 fraction=0.5"));
}

#[test]
fn a_request_goes_where_it_fits() {
    check("A:500/1000", "fraction=0.333", expect!["A"]);
    check("A:500/1000", "fraction=0.5", expect!["A"]);
    check("A:400/1000 B:500/1000", "fraction=0.5", expect!["B"]);
    check("A:300/1000 B:700/1000", "memory=700", expect!["B"]);
    check("A:999/1000 B:1000/1000", "whole", expect!["B"]);
    check("A:1000/1000@T4 B:1000/1000@A100", "whole model=A100", expect!["B"]);
    check("A:1000/1000@T4 B:1000/1000@A10", "fraction=0.1 model=A100|A10", expect!["B"]);
    check("A:1000/1000", "cpu=16000", expect![""]);
}

#[test]
fn several_devices_are_distinct() {
    check("A:500/1000 B:500/1000", "fraction=0.25 count=2", expect!["A+B"]);
    check("A:500/1000", "fraction=0.25 count=2", expect!["TooFewDevices { suitable: 1 }"]);
    check("A:500/1000 B:100/1000", "fraction=0.25 count=2", expect!["DevicesTaken { fitting: 1 }"]);
    check(
        "A:1000/1000@T4 B:1000/1000@A100",
        "whole model=A100 count=2",
        expect!["TooFewDevices { suitable: 1 }"],
    );
    check(
        "A:1000/1000 B:0/1000 C:0/1000",
        "whole count=4",
        expect!["TooFewDevices { suitable: 3 }"],
    );
}

#[test]
fn memory_and_share_are_two_dimensions() {
    check("A:900/1000,0.2", "fraction=0.2 memory=900", expect!["A"]);
    check("A:900/1000,0.2", "fraction=0.1 memory=901", expect!["Memory { short: MemMib(1) }"]);
    check("A:900/1000,0.2", "fraction=0.200001 memory=1", expect!["Share { short: Share(1) }"]);
    check("A:900/1000,0.2 B:100/1000,0.9", "fraction=0.9 memory=100", expect!["B"]);
    // a memory request takes compute in proportion, rounded down
    check("A:900/1000,0.2", "memory=200", expect!["A"]);
    check("A:900/1000,0.2", "memory=201", expect!["Share { short: Share(1000) }"]);
    check("A:3/3", "memory=1", expect!["A"]);
}

#[test]
fn a_rejection_names_the_obstacle_with_the_smallest_fix() {
    check("", "fraction=0.1", expect!["NoDevices"]);
    check("A:1000/1000@T4", "fraction=0.1 model=A100", expect!["Model"]);
    check("A:1000/1000", "mig=1g.5gb", expect!["Kind"]);
    check("A:1000/1000", "slot", expect!["NoReplicas"]);
    check("A:1000/1000", "memory=1001", expect!["TooLarge { over: MemMib(1) }"]);
    check("A:1/1000 B:1/1500", "memory=2000", expect!["TooLarge { over: MemMib(500) }"]);
    check("A!:1000/1000 B!:10/1000", "fraction=0.5", expect!["Unhealthy"]);
    check("A!:1000/1000 B:10/1000", "fraction=0.5", expect!["Memory { short: MemMib(490) }"]);
    check("A:100/1000 B:300/1000", "fraction=0.5", expect!["Memory { short: MemMib(200) }"]);
    check("A:1000/1000", "fraction=0.5 cpu=16001", expect!["Cpu { short: MilliCpu(1) }"]);
}

#[test]
fn a_mig_instance_is_allocated_whole_and_by_its_profile() {
    let node = "A=1g.5gb:500/500 B=2g.10gb:1000/1000";
    check(node, "mig=2g.10gb", expect!["B"]);
    check(node, "mig=3g.20gb", expect!["Kind"]);
    check(node, "fraction=0.1", expect!["Kind"]);
    check(node, "whole", expect!["Kind"]);
    check("A=1g.5gb:0/500", "mig=1g.5gb", expect!["Memory { short: MemMib(500) }"]);
    check("A=1g.5gb:500/500 B=1g.5gb:500/500", "mig=1g.5gb count=2", expect!["A+B"]);
}

#[test]
fn binpack_takes_the_fullest_device_that_fits() {
    let pack = |node, request, expected| check_policy(node, request, Policy::BinPack, expected);
    pack("A:1000/1000 B:600/1000 C:500/1000 D:100/1000", "fraction=0.5", expect!["C"]);
    pack("A:1000/1000 B:1000/1000", "fraction=0.5", expect!["A"]);
    pack("A:1000/1000 B:900/1000 C:800/1000", "fraction=0.5 count=2", expect!["C+B"]);
    // the fuller of both dimensions counts: B has little memory but much compute left
    pack("A:600/1000,0.6 B:500/1000,0.9", "fraction=0.1 memory=100", expect!["A"]);
}

#[test]
fn spread_takes_the_device_with_the_fewest_tenants() {
    let spread = |node, request, expected| check_policy(node, request, Policy::Spread, expected);
    spread("A:600/1000 B:1000/1000 C:1000/1000", "fraction=0.5", expect!["B"]);
    spread("A:600/1000 B:700/1000", "fraction=0.5", expect!["B"]);
    spread("A:600/1000 B:1000/1000 C:700/1000", "fraction=0.5 count=2", expect!["B+C"]);
}

#[test]
fn fragmentation_preserves_room_for_typical_requests() {
    let keep = |node: &str, request: &str, mix: &str, expected: Expect| {
        expected.assert_eq(&answer(node, request, Policy::Fragmentation, mix));
    };
    // 0.3 of B leaves 0.2 that no half can use; 0.3 of A leaves a half
    keep("A:800/1000 B:500/1000", "fraction=0.3", "1 fraction=0.5", expect!["A"]);
    // whole GPUs are requested: the one that is no longer whole costs nothing
    keep("A:1000/1000 B:800/1000", "fraction=0.3", "1 whole", expect!["B"]);
    // two halves: together they fill two shared GPUs
    let node = "A:1000/1000 B:600/1000 C:1000/1000 D:700/1000";
    keep(node, "fraction=0.5 count=2", "1 whole", expect!["B+D"]);
    // without a mix there is nothing to expect, and the fullest is taken
    keep("A:1000/1000 B:800/1000", "fraction=0.3", "", expect!["B"]);
}

#[test]
fn held_room_is_free_only_for_the_bind_of_its_pod() {
    let (mut node, classes) = node_fixture::node("A:1000/1000");
    let compiled = node_fixture::compiled_request("fraction=0.6 cpu=9000", &classes);
    let mix = node_fixture::compiled("", &node, &classes);
    let strategy = &Strategy::Policy(Policy::BinPack);
    let place = evaluate(&node, &compiled, strategy, &mix, HoldRule::Respected).unwrap();
    let hold = Hold {
        placement: placement(&node, &place),
        host: HostAmount { cpu: MilliCpu::new(9000), memory: MemMib::ZERO },
        expires: Timestamp::START,
        is_promise: false,
    };
    node.hold(PodUid::new("other"), hold.clone());
    let refused = evaluate(&node, &compiled, strategy, &mix, HoldRule::Respected);
    assert!(matches!(refused, Err(Rejection::Memory { .. })), "{refused:?}");
    let cpu_only = node_fixture::compiled_request("cpu=9000", &classes);
    let refused = evaluate(&node, &cpu_only, strategy, &mix, HoldRule::Respected);
    assert!(matches!(refused, Err(Rejection::Cpu { .. })), "{refused:?}");
    for compiled in [&compiled, &cpu_only] {
        assert!(evaluate(&node, compiled, strategy, &mix, HoldRule::Ignored).is_ok());
    }
    assert!(still_fits(&node, &compiled, &hold.placement));
}

#[test]
fn an_untrusted_node_gets_no_gpu_pod() {
    let (mut node, classes) = node_fixture::node("A:1000/1000");
    let mix = node_fixture::compiled("", &node, &classes);
    let compiled = node_fixture::compiled_request("fraction=0.5", &classes);
    let strategy = &Strategy::Policy(Policy::BinPack);
    let found =
        |node: &NodeState| evaluate(node, &compiled, strategy, &mix, HoldRule::Ignored).map(|_| ());
    assert_eq!(found(&node), Ok(()));
    node.silence(std::time::Duration::ZERO, Timestamp::from_millis(1));
    assert_eq!(found(&node), Err(Rejection::NotReporting));
    node.lose_node();
    assert_eq!(found(&node), Err(Rejection::NodeGone));
    let fresh = NodeState::new(wire::ids::NodeName::new("m"), MemMib::ZERO);
    assert_eq!(found(&fresh), Err(Rejection::NeverReported));
}

/// Devices and isolation that a pod gets in a pool with this rule, the same under every policy.
#[expect(clippy::needless_pass_by_value, reason = "an expectation is written at the call")]
fn check_pool(rule: &str, node_text: &str, request_text: &str, expected: Expect) {
    let (mut node, mut classes) = node_fixture::node(node_text);
    node.share_by(node_fixture::rule(rule), &mut classes);
    let compiled = node_fixture::compiled_request(request_text, &classes);
    let mix = node_fixture::compiled("1 fraction=0.5; 1 slot", &node, &classes);
    for policy in Policy::ALL {
        let found =
            evaluate(&node, &compiled, &Strategy::Policy(policy), &mix, HoldRule::Respected);
        expected.assert_eq(&found.map_or_else(
            |rejection| format!("{rejection:?}"),
            |place| {
                let placed = placement(&node, &place);
                assert!(still_fits(&node, &compiled, &placed), "what was just found fits");
                let devices = placed.devices.iter().map(|PlacedDevice { id, demand }| {
                    format!("{id}:{},{}", demand.memory.mib(), demand.share)
                });
                let devices: Vec<String> = devices.collect();
                format!("{} {}", devices.join("+"), placed.isolation.name())
            },
        ));
    }
}

#[test]
fn a_device_with_replicas_is_allocated_in_whole_slots() {
    let four = "replicas=4";
    check_pool(four, "A:1000/1000", "slot", expect!["A:250,0.25 none"]);
    check_pool(four, "A:1000/1000", "fraction=0.25", expect!["A:250,0.25 none"]);
    check_pool(four, "A:1000/1000", "fraction=0.3", expect!["A:500,0.5 none"]);
    check_pool(four, "A:1000/1000", "memory=251", expect!["A:500,0.5 none"]);
    check_pool(four, "A:1000/1000", "fraction=0.1 memory=600", expect!["A:750,0.75 none"]);
    check_pool(four, "A:1000/1000", "fraction=0.9", expect!["A:1000,1 hardware"]);
    check_pool(four, "A:1000/1000", "whole", expect!["A:1000,1 hardware"]);
    check_pool(four, "A:250/1000 B:0/1000", "slot", expect!["A:250,0.25 none"]);
    check_pool(four, "A:249/1000,0.25", "slot", expect!["Memory { short: MemMib(1) }"]);
    check_pool(four, "A:400/1000", "fraction=0.3", expect!["Memory { short: MemMib(100) }"]);
    check_pool(four, "A:1000/1000", "memory=1001", expect!["TooLarge { over: MemMib(1) }"]);
    check_pool("replicas=3", "A:1000/1000", "fraction=0.3333", expect!["A:333,0.333333 none"]);
    check_pool(
        four,
        "A:1000/1000 B:1000/1000",
        "fraction=0.2 count=2",
        expect!["A:250,0.25+B:250,0.25 none"],
    );
}

#[test]
fn a_shared_instance_is_used_like_a_gpu_and_a_whole_one_is_not() {
    let node = "A=1g.5gb:500/500";
    check_pool("shared", node, "fraction=0.5", expect!["A:250,0.5 none"]);
    check_pool("shared", node, "memory=100", expect!["A:100,0.2 none"]);
    check_pool("shared", node, "memory=501", expect!["TooLarge { over: MemMib(1) }"]);
    check_pool("shared", node, "mig=1g.5gb", expect!["A:500,1 hardware"]);
    check_pool(
        "shared",
        "A=1g.5gb:250/500",
        "mig=1g.5gb",
        expect!["Memory { short: MemMib(250) }"],
    );
    check_pool("shared replicas=2", node, "slot", expect!["A:250,0.5 none"]);
    check_pool("shared replicas=2", node, "fraction=0.6", expect!["A:500,1 hardware"]);
    check_pool("replicas=2", node, "slot", expect!["Kind"]);
    check_pool("replicas=2", node, "mig=1g.5gb", expect!["A:500,1 hardware"]);
    check_pool("shared", node, "whole", expect!["Kind"]);
    check_pool("shared", node, "mig=1g.10gb", expect!["Kind"]);
    let two = "A=1g.5gb:500/500 B=1g.5gb:500/500";
    check_pool("shared", two, "fraction=0.5 count=2", expect!["Kind"]);
    check_pool("shared", two, "mig=1g.5gb count=2", expect!["A:500,1+B:500,1 hardware"]);
    let models = "A=1g.5gb:500/500@A100 B=3g.20gb:900/900@A100";
    check_pool("shared", models, "fraction=0.1 model=3g.20gb", expect!["B:90,0.1 none"]);
    check_pool("shared", models, "fraction=0.1 model=MIG", expect!["A:50,0.1 none"]);
    check_pool("shared", models, "fraction=0.1 model=H100", expect!["Model"]);
    check_pool("", "A=1g.10gb+me:500/500", "mig=1g.10gb.me", expect!["A:500,1 hardware"]);
    check_pool("", "A=1g.10gb+me:500/500", "mig=1g.10gb", expect!["Kind"]);
}

#[test]
fn hardware_isolation_requires_an_exclusive_device() {
    let hardware = |words: &str| format!("{words} isolation=hardware");
    for rule in ["", "mps", "driver"] {
        check_pool(rule, "A:1000/1000", &hardware("fraction=0.5"), expect!["PartOfGpu"]);
        check_pool(rule, "A:1000/1000", &hardware("whole"), expect!["A:1000,1 hardware"]);
    }
    check_pool(
        "replicas=2",
        "A:1000/1000",
        &hardware("fraction=0.6"),
        expect!["A:1000,1 hardware"],
    );
    let node = "A=1g.5gb:500/500 B=2g.10gb:1000/1000";
    check_pool("", node, &hardware("memory=600"), expect!["B:1000,1 hardware"]);
    check_pool("", node, "memory=600", expect!["Kind"]);
    let large_first = "A=3g.20gb:2000/2000 B=1g.5gb:500/500 C=2g.10gb:1000/1000";
    check_pool("", large_first, &hardware("memory=600"), expect!["C:1000,1 hardware"]);
    check_pool("", large_first, &hardware("memory=400"), expect!["B:500,1 hardware"]);
    check_pool("", node, &hardware("fraction=0.5"), expect!["Kind"]);
    check_pool("", node, &hardware("mig=2g.10gb"), expect!["B:1000,1 hardware"]);
    check_pool("shared mps", node, &hardware("memory=600"), expect!["B:1000,1 hardware"]);
    check_pool("shared", "A=1g.5gb:499/500", &hardware("slot"), expect!["NoReplicas"]);
    check_pool(
        "shared",
        "A=1g.5gb:499/500",
        &hardware("memory=9"),
        expect!["Memory { short: MemMib(1) }"],
    );
}

#[test]
fn memory_isolation_requires_enforcement_and_limited_neighbors() {
    let half = "fraction=0.5 isolation=memory";
    check_pool("", "A:1000/1000", half, expect!["NoIsolation"]);
    check_pool("mps", "A:1000/1000", half, expect!["A:500,0.5 mps"]);
    check_pool("driver", "A:1000/1000", half, expect!["A:500,0.5 driver"]);
    check_pool("", "A:1000/1000", "whole isolation=memory", expect!["A:1000,1 hardware"]);
    // the tenant of the fixture was placed without isolation
    check_pool("mps", "A:600/1000", half, expect!["UnisolatedTenant"]);
    check_pool("mps", "A:600/1000 B:900/1000", half, expect!["UnisolatedTenant"]);
    check_pool("mps", "A:600/1000 B:1000/1000", half, expect!["B:500,0.5 mps"]);
    check_pool("mps", "A:600/1000", "fraction=0.5", expect!["A:500,0.5 mps"]);
    // the driver's limits do not apply in MIG instances
    check_pool("shared driver", "A=1g.5gb:500/500", half, expect!["NoIsolation"]);
    check_pool("shared mps", "A=1g.5gb:500/500", half, expect!["A:250,0.5 mps"]);
    check_pool("", "A=1g.5gb:500/500", "mig=1g.5gb isolation=memory", expect!["A:500,1 hardware"]);
    check_pool(
        "mps",
        "A:600/1000 B:1000/1000",
        "fraction=0.5 count=2 isolation=memory",
        expect!["DevicesTaken { fitting: 1 }"],
    );
}

/// A node whose GPU `A` has one tenant with memory isolation by MPS.
fn with_protected_tenant() -> (NodeState, crate::hardware::device_class::DeviceClasses) {
    let (mut node, mut classes) = node_fixture::node("A:1000/1000");
    node.share_by(node_fixture::rule("mps"), &mut classes);
    let (request, _) = node_fixture::request("fraction=0.25 isolation=memory");
    let compiled = node_fixture::compiled_request("fraction=0.25 isolation=memory", &classes);
    let mix = node_fixture::compiled("", &node, &classes);
    let place =
        evaluate(&node, &compiled, &Strategy::Policy(Policy::BinPack), &mix, HoldRule::Respected);
    let mut tenant = node_fixture::tenant("guarded", Vec::new());
    tenant.placement = placement(&node, &place.unwrap());
    tenant.request = request.map(Into::into);
    node.allocate(tenant);
    (node, classes)
}

#[test]
fn no_unisolated_pod_joins_a_tenant_that_requires_isolation() {
    use crate::model::device_state::Verification;
    use wire::ids::DeviceId;
    let answer = |node: &NodeState, classes: &_, request_text: &str| {
        let compiled = node_fixture::compiled_request(request_text, classes);
        fit(&compiled, &node.rooms(HoldRule::Respected)[0]).err()
    };
    let (mut node, mut classes) = with_protected_tenant();
    assert_eq!(node.devices()[0].verification(), Verification::Configured);
    let guarded = "fraction=0.25 isolation=memory";
    assert_eq!(answer(&node, &classes, "fraction=0.25"), None);
    assert_eq!(answer(&node, &classes, guarded), None);
    // the agent finds that nothing limits them
    let id = DeviceId::new("A").unwrap();
    node.set_verification(&id, Verification::Missing);
    assert_eq!(answer(&node, &classes, "fraction=0.25"), Some(Rejection::IsolatedTenant));
    assert_eq!(answer(&node, &classes, guarded), Some(Rejection::UnverifiedIsolation));
    node.set_verification(&id, Verification::Verified);
    assert_eq!(answer(&node, &classes, guarded), None);
    // the operator configures no enforcement
    node.share_by(node_fixture::rule(""), &mut classes);
    assert_eq!(answer(&node, &classes, "fraction=0.25"), Some(Rejection::IsolatedTenant));
    assert_eq!(answer(&node, &classes, guarded), Some(Rejection::NoIsolation));
    node.remove(&PodUid::new("guarded"));
    assert_eq!(answer(&node, &classes, "fraction=0.25"), None);
    assert_eq!(node.audit(), Ok(()));
}

#[test]
fn use_without_a_reservation_has_no_limit() {
    use wire::ids::DeviceId;
    use wire::seen::DeviceUse;
    let (mut node, classes) = with_protected_tenant();
    let seen = |used: u64| DeviceUse {
        used: Some(MemMib::new(used)),
        ..DeviceUse::idle(DeviceId::new("A").unwrap())
    };
    let compiled = node_fixture::compiled_request("fraction=0.25 isolation=memory", &classes);
    for (used, expected) in [(10, Some(Rejection::UnisolatedTenant)), (0, None)] {
        node.observe(&[seen(used)], Timestamp::START);
        assert_eq!(fit(&compiled, &node.rooms(HoldRule::Respected)[0]).err(), expected, "{used}");
    }
}
