use super::*;
use crate::request::annotations::parse_request;
use crate::request::resources::ContainerKind;
use wire::units::MemMib;

fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

fn container(resources: &[(&str, &str)]) -> ContainerRequest {
    let (name, kind) = ("main".to_owned(), ContainerKind::Regular);
    ContainerRequest { name, kind, resources: map(resources) }
}

/// The label of the refusal of a pod of ours with these annotations and resources, if any.
fn label(
    rules: &RequestRules,
    annotations: &[(&str, &str)],
    resources: &[(&str, &str)],
) -> Result<(), RequestError> {
    let (annotations, containers) = (map(annotations), [container(resources)]);
    let request = parse_request(&annotations, &containers).unwrap();
    check(rules, request.as_ref(), &other_keys(&annotations, &containers))
}

#[test]
fn a_resource_of_another_scheduler_is_rejected_with_the_key_to_use() {
    for (resource, instead) in [
        ("nvidia.com/gpumem", "`gpu-memory`"),
        ("nvidia.com/gpumem-percentage", "`gpu-fraction`"),
        ("nvidia.com/gpucores", "`gpu-fraction`"),
        ("nvidia.com/vgpu-number", "`gpu-fraction-num-devices`"),
        ("nvidia.com/gpu-10gb", "`gpu-memory`"),
        ("nvidia.com/mig-", "`nvidia.com/gpu`"),
        ("nvidia.com/anything", "`nvidia.com/gpu`"),
        ("aliyun.com/gpu-mem", "`gpu-memory`"),
        ("aliyun.com/gpu-count", "`gpu-fraction`"),
        ("volcano.sh/vgpu-memory", "`gpu-memory`"),
        ("volcano.sh/vgpu-cores", "`gpu-fraction`"),
        ("koordinator.sh/gpu", "`gpu-fraction`"),
        ("koordinator.sh/gpu.shared", "`gpu-fraction`"),
        ("elasticgpu.io/gpu-core", "`gpu-fraction`"),
        ("tencent.com/vcuda-core", "`gpu-fraction`"),
        ("tke.cloud.tencent.com/qgpu-memory", "`gpu-fraction`"),
        ("mig.das.com/1g.5gb", "`nvidia.com/mig-<profile>`"),
        ("amd.com/gpu", "`schedulerName`"),
        ("gpu.intel.com/i915", "`schedulerName`"),
        ("deviceclass.resource.kubernetes.io/gpu.nvidia.com", "`nvidia.com/gpu`"),
    ] {
        let rules = RequestRules::default();
        let one = [("nvidia.com/gpu", "1"), (resource, "4096")];
        for (annotations, resources) in
            [(&[][..], &one[..]), (&[], &one[1..]), (&[("gpu-fraction", "0.5")], &one[1..])]
        {
            let error = label(&rules, annotations, resources).expect_err(resource);
            assert_eq!(error.label(), "other_resource");
            let message = error.to_string();
            for part in [resource, instead, "`main`", "`other_resources`"] {
                assert!(message.contains(part), "`{part}` is not in `{message}`");
            }
            assert_eq!(error.reason().find(resource), None, "the reason is constant");
        }
        assert_eq!(label(&rules, &[], &[(resource, "0")]), Ok(()), "nothing of it is requested");
        let listed = RequestRules { other_resources: vec![resource.to_owned()], ..rules };
        assert_eq!(label(&listed, &[("gpu-fraction", "0.5")], &one[1..]), Ok(()), "{resource}");
    }
}

#[test]
fn annotations_of_other_schedulers_are_rejected_with_the_key_to_use() {
    for (key, instead) in [
        ("kai.scheduler/container.main.gpu-memory.portion.limit", "`gpu-fraction.limit`"),
        ("nvidia.com/use-gpuuuid", "`gpupack.dev/gpu-model`"),
        ("nvidia.com/nouse-gputype", "`gpupack.dev/gpu-model`"),
        ("nvidia.com/include-gpu-uuid", "`gpupack.dev/gpu-model`"),
        ("alibabacloud.com/gpu-milli", "`gpu-fraction`"),
        ("scheduling.koordinator.sh/gpu-partition-spec", "number"),
    ] {
        let annotations = [("gpu-fraction", "0.5"), (key, "x")];
        for annotations in [&annotations[..], &annotations[1..]] {
            let error = label(&RequestRules::default(), annotations, &[]).expect_err(key);
            assert_eq!(error.label(), "other_annotation");
            let message = error.to_string();
            assert!(message.contains(key) && message.contains(instead), "{message}");
        }
    }
}

#[test]
fn other_resources_and_informational_variables_are_left_alone() {
    let annotations = [
        ("gpu-fraction", "0.5"),
        ("nvidia.com/container.main.gpu-compute.mode", "time-slicing"),
        ("hami.io/gpu-scheduler-policy", "binpack"),
        ("hami.io/vgpu-devices-allocated", "x"),
        ("alibabacloud.com/gpu-index", "0"),
        ("scheduling.koordinator.sh/device-allocated", "{}"),
        ("kai.scheduler/queue", "team-a"),
        ("kai.scheduler/container.main", "x"),
        ("runai/shared-gpu-configmap", "x"),
        ("received-resource-type", "Fraction"),
        ("my-nvidia.com/use-gpuuuid", "x"),
        ("gpumem", "x"),
    ];
    let resources = [
        ("cpu", "1"),
        ("hugepages-2Mi", "4Mi"),
        ("rdma/hca_shared", "1"),
        ("koordinator.sh/rdma", "1"),
        ("aliyun.com/eni", "1"),
        ("volcano.sh/other", "1"),
        ("amd.com/nic", "1"),
        ("example.com/gpu", "1"),
        ("gpupack.dev/gpu-share", "500000"),
    ];
    assert_eq!(label(&RequestRules::default(), &annotations, &resources), Ok(()));
    for ours in ["nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb.me"] {
        assert_eq!(label(&RequestRules::default(), &[], &[(ours, "1")]), Ok(()), "{ours}");
    }
}

#[test]
fn the_operator_sets_the_minimum_memory_and_the_maximum_limit() {
    let rules = RequestRules {
        min_memory: MemMib::new(64),
        max_limit: Share::from_millionths(500_000),
        ..RequestRules::default()
    };
    for (annotations, expected) in [
        (&[("gpu-memory", "63")][..], Some("small_memory")),
        (&[("gpu-memory", "64")], None),
        (&[("gpu-memory", "1"), ("gpu-fraction", "0.5")], Some("small_memory")),
        (&[("gpu-fraction", "0.00001")], None), // the amount depends on the GPU
        (&[("gpu-fraction", "0.1"), ("gpu-fraction.limit", "0.5")], None),
        (&[("gpu-fraction", "0.1"), ("gpu-fraction.limit", "0.50001")], Some("limit_above_max")),
        (&[("gpu-fraction", "0.1"), ("gpu-fraction-limit", "1")], Some("limit_above_max")),
        (&[("gpu-fraction", "0.7"), ("gpu-fraction.limit", "0.7")], None),
        (&[("gpu-fraction", "0.7")], None),
        (&[("gpu-memory", "64"), ("gpu-memory.limit", "800Gi")], None), // the memory guard caps it
    ] {
        let refused = label(&rules, annotations, &[]).err();
        assert_eq!(refused.as_ref().map(RequestError::label), expected, "{annotations:?}");
        if let Some(error) = refused {
            let message = error.to_string();
            assert!(message.contains("64 MiB") || message.contains("at most 0.5"), "{message}");
        }
    }
}
