use crate::request::resources::ContainerKind;
use proptest::prelude::*;

use super::*;
use engine::model::request::MAX_DEVICES_PER_POD;
use wire::ids::{MAX_DEVICE_MEMORY, ModelName};

fn annotations(text: &str) -> BTreeMap<String, String> {
    text.split(';')
        .filter(|pair| !pair.is_empty())
        .map(|pair| pair.split_once('=').expect("key=value"))
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect()
}

/// `main;init:setup;worker nvidia.com/gpu=2`
fn containers(text: &str) -> Vec<ContainerRequest> {
    text.split(';')
        .map(|container| {
            let (kind, rest) = match container.strip_prefix("init:") {
                Some(rest) => (ContainerKind::Init, rest),
                None => (ContainerKind::Regular, container),
            };
            let mut words = rest.split(' ');
            let name = words.next().unwrap().to_owned();
            let resources = words.map(|word| word.split_once('=').unwrap());
            let resources = resources.map(|(k, v)| (k.to_owned(), v.to_owned())).collect();
            ContainerRequest { name, kind, resources }
        })
        .collect()
}

fn parse(keys: &str, pod: &str) -> Result<Option<GpuRequest>, RequestError> {
    parse_request(&annotations(keys), &containers(pod))
}

/// What the parser understood, in one line.
fn in_words(request: &GpuRequest) -> String {
    let amount = match &request.amount {
        Amount::Fraction(share) => format!("share {share}"),
        Amount::Memory(memory) => format!("memory {}", memory.mib()),
        Amount::FractionAndMemory(share, memory) => {
            format!("share {share} memory {}", memory.mib())
        }
        Amount::Whole => "whole".to_owned(),
        Amount::MigInstance(profile) => format!("mig {profile}"),
        Amount::SharedSlot => "slot".to_owned(),
    };
    let mut words = format!("{} x {amount}", request.count);
    match request.limit {
        Some(Limit::Fraction(share)) => words += &format!(" limit {share}"),
        Some(Limit::Memory(memory)) => words += &format!(" limit {}", memory.mib()),
        None => {}
    }
    if let Some(container) = &request.container {
        words += &format!(" in {container}");
    }
    if !request.models.is_any() {
        words += &format!(" on {}", request.models.names().collect::<Vec<_>>().join("|"));
    }
    if let Some(policy) = request.policy {
        words += &format!(" by {policy}");
    }
    match request.isolation {
        Isolation::None => words,
        isolation => words + &format!(" behind {isolation:?}"),
    }
}

/// Annotations, containers and the parsed request.
const UNDERSTOOD: &[(&str, &str, &str)] = &[
    ("gpu-fraction=0.5", "main", "1 x share 0.5"),
    ("gpu-fraction=0.33333", "main", "1 x share 0.33333"),
    ("gpu-fraction=1", "main", "1 x whole"),
    ("gpu-fraction=1.00000", "main", "1 x whole"),
    ("gpu-memory=8192", "main", "1 x memory 8192"),
    ("gpu-fraction=0.3;gpu-memory=2000", "main", "1 x share 0.3 memory 2000"),
    ("gpu-fraction=0.3;gpu-fraction.limit=0.9", "main", "1 x share 0.3 limit 0.9"),
    ("gpu-fraction=0.3;gpu-fraction-limit=1", "main", "1 x share 0.3 limit 1"),
    (
        "gpu-fraction=0.3;gpu-fraction-limit=0.5;gpu-fraction.limit=0.50",
        "main",
        "1 x share 0.3 limit 0.5",
    ),
    ("gpu-memory=1000;gpu-memory.limit=8Gi", "main", "1 x memory 1000 limit 8192"),
    ("gpu-memory=1000;gpu-memory-limit=2000", "main", "1 x memory 1000 limit 2000"),
    (
        "gpu-memory=1024;gpu-memory-limit=2048;gpu-memory.limit=2Gi",
        "main",
        "1 x memory 1024 limit 2048",
    ),
    (
        "gpu-fraction=0.3;gpu-memory=1000;gpu-memory.limit=1Gi",
        "main",
        "1 x share 0.3 memory 1000 limit 1024",
    ),
    ("gpu-fraction=0.5;gpu-fraction-num-devices=4", "main", "4 x share 0.5"),
    ("gpu-memory=10;gpu-fraction-num-devices=64", "main", "64 x memory 10"),
    (
        "gpu-fraction=0.5;gpu-fraction-container-name=setup",
        "main;init:setup",
        "1 x share 0.5 in setup",
    ),
    (
        "gpu-fraction=0.5;gpupack.dev/gpu-model=H100 | A100-SXM4",
        "main",
        "1 x share 0.5 on A100-SXM4|H100",
    ),
    (
        "gpu-fraction=0.5;gpupack.dev/policy=spread;gpupack.dev/isolation=hardware",
        "main",
        "1 x share 0.5 by spread behind Hardware",
    ),
    ("", "main nvidia.com/gpu=2 cpu=4", "2 x whole in main"),
    ("gpupack.dev/policy=binpack", "a;b nvidia.com/gpu=1", "1 x whole in b by binpack"),
    ("gpu-fraction-container-name=b", "a;b nvidia.com/gpu=1", "1 x whole in b"),
    ("", "init:setup nvidia.com/gpu=1;main", "1 x whole in setup"),
    ("", "main nvidia.com/gpu.shared=1", "1 x slot in main"),
    ("", "main nvidia.com/mig-1g.10gb=3", "3 x mig 1g.10gb in main"),
    ("gpu-fraction=0.5", "main nvidia.com/gpu=0", "1 x share 0.5"),
    ("nvidia.com/container.main.gpu-memory.request=1.5Gi", "main", "1 x memory 1536 in main"),
    (
        "nvidia.com/container.b.gpu-memory.request=1G;nvidia.com/container.b.gpu-memory.limit=2Gi",
        "a;b",
        "1 x memory 954 limit 2048 in b",
    ),
    (
        "nvidia.com/container.main.gpu-memory.limit=8Gi;nvidia.com/container.main.gpu-compute.mode=time-slicing",
        "main",
        "1 x memory 8192 limit 8192 in main",
    ),
    (
        "gpu-memory=8192;nvidia.com/container.main.gpu-memory.request=8Gi",
        "main",
        "1 x memory 8192 in main",
    ),
];

#[test]
fn every_form_of_the_query_is_accepted() {
    for &(keys, pod, expected) in UNDERSTOOD {
        let request = parse(keys, pod).unwrap_or_else(|error| panic!("{keys}: {error}"));
        assert_eq!(in_words(&request.expect(keys)), expected, "{keys}");
    }
    for keys in ["", "app=web", "nvidia.com/driver=x;mps=true", "placed.gpupack.dev/fence=3"] {
        assert_eq!(parse(keys, "main nvidia.com/gpu=0 example.com/gpu=1"), Ok(None), "{keys}");
    }
}

/// Annotations, containers, label, and what the message must name: key, value and fix.
const REFUSED: &[(&str, &str, &str, [&str; 3])] = &[
    ("gpu-fraction=0", "main", "fraction", ["gpu-fraction", "`0`", "at most 5 decimals"]),
    ("gpu-fraction=0.0", "main", "fraction", ["gpu-fraction", "`0.0`", "above 0"]),
    ("gpu-fraction=1.5", "main", "fraction", ["gpu-fraction", "`1.5`", "up to 1"]),
    ("gpu-fraction=0.123456", "main", "fraction", ["gpu-fraction", "`0.123456`", "5 decimals"]),
    ("gpu-fraction=NaN", "main", "fraction", ["gpu-fraction", "`NaN`", "decimal"]),
    ("gpu-fraction=", "main", "fraction", ["gpu-fraction", "``", "decimal"]),
    ("gpu-memory=8Gi", "main", "memory", ["gpu-memory", "`8Gi`", "without a unit"]),
    ("gpu-memory=0", "main", "memory", ["gpu-memory", "`0`", "from 1 to 16777216"]),
    ("gpu-memory=16777217", "main", "memory", ["gpu-memory", "`16777217`", "16777216"]),
    ("gpu-memory=-5", "main", "memory", ["gpu-memory", "`-5`", "whole number"]),
    (
        "gpu-memory=1;gpu-memory.limit=8",
        "main",
        "memory",
        ["gpu-memory.limit", "`8`", "with its unit"],
    ),
    (
        "gpu-memory=1;gpu-memory-limit=8Gi",
        "main",
        "memory",
        ["gpu-memory-limit", "`8Gi`", "without a unit"],
    ),
    (
        "gpu-fraction=0.5;gpu-fraction-num-devices=0",
        "main",
        "device_count",
        ["gpu-fraction-num-devices", "`0`", "from 1 to 64"],
    ),
    (
        "gpu-fraction=0.5;gpu-fraction-num-devices=65",
        "main",
        "device_count",
        ["gpu-fraction-num-devices", "`65`", "from 1 to 64"],
    ),
    (
        "gpu-fraction-num-devices=2",
        "main",
        "orphan",
        ["gpu-fraction-num-devices", "`2`", "add `gpu-fraction`"],
    ),
    (
        "gpu-fraction=0.5;gpu-fraction-container-name=mian",
        "main;init:setup",
        "container",
        ["gpu-fraction-container-name", "`mian`", "`main`, `setup`"],
    ),
    (
        "gpu-fraction-container-name=main",
        "main",
        "orphan",
        ["gpu-fraction-container-name", "`main`", "remove"],
    ),
    ("gpupack.dev/gpu-model=A100", "main", "orphan", ["gpu-model", "`A100`", "add"]),
    ("gpupack.dev/policy=binpack", "main", "orphan", ["policy", "`binpack`", "remove"]),
    ("gpupack.dev/isolation=none", "main", "orphan", ["isolation", "`none`", "remove"]),
    (
        "gpu-fraction=0.5;gpupack.dev/gpu-model=A100||H100",
        "main",
        "model",
        ["gpu-model", "`A100||H100`", "separated by `|`"],
    ),
    (
        "gpu-fraction=0.5;gpupack.dev/gpu-model=!RTX 4090 D",
        "main",
        "model",
        ["`gpupack.dev/gpu-model`", "`!RTX 4090 D`", "remove others, which exclude nothing"],
    ),
    (
        "gpu-fraction=0.5;gpupack.dev/gpu-model=A100|=RTX 4090",
        "main",
        "model",
        ["`gpupack.dev/gpu-model`", "`A100|=RTX 4090`", "letters, digits, blanks, `-./()+_`"],
    ),
    (
        "gpu-fraction=0.5;gpupack.dev/policy=pack",
        "main",
        "policy",
        ["gpupack.dev/policy", "`pack`", "`fragmentation`"],
    ),
    (
        "gpu-fraction=0.5;gpupack.dev/isolation=Memory",
        "main",
        "isolation",
        ["gpupack.dev/isolation", "`Memory`", "`hardware`"],
    ),
    (
        "gpu-fraction=0.5;gpu-fraction.limit=0.4",
        "main",
        "limit_below_request",
        ["gpu-fraction.limit", "`0.4`", "at least the request"],
    ),
    (
        "gpu-fraction=0.5;gpu-fraction.limit=1.1",
        "main",
        "fraction",
        ["gpu-fraction.limit", "`1.1`", "up to 1"],
    ),
    (
        "gpu-memory=2000;gpu-memory.limit=1Gi",
        "main",
        "limit_below_request",
        ["gpu-memory.limit", "`1Gi`", "raise the limit"],
    ),
    (
        "gpu-memory=2000;gpu-fraction.limit=0.5",
        "main",
        "limit_style",
        ["gpu-fraction.limit", "`0.5`", "add `gpu-fraction`"],
    ),
    (
        "gpu-fraction=0.5;gpu-memory.limit=8Gi",
        "main",
        "limit_style",
        ["gpu-memory.limit", "`8Gi`", "add `gpu-memory`"],
    ),
    ("gpu-memory.limit=8Gi", "main", "orphan", ["gpu-memory.limit", "`8Gi`", "gpu-memory"]),
    (
        "gpu-fraction=0.1;gpu-fraction.limit=0.5;gpu-fraction-limit=0.6",
        "main",
        "disagreement",
        ["gpu-fraction.limit", "`0.6`", "keep one"],
    ),
    (
        "gpu-memory=1;gpu-fraction=0.1;gpu-memory-limit=5;gpu-fraction-limit=0.6",
        "main",
        "disagreement",
        ["gpu-memory-limit", "`0.6`", "keep one"],
    ),
    (
        "gpu-memory=8000;nvidia.com/container.main.gpu-memory.request=8Gi",
        "main",
        "disagreement",
        ["gpu-memory", "`8Gi`", "keep one"],
    ),
    (
        "nvidia.com/container.a.gpu-memory.request=1Gi;nvidia.com/container.b.gpu-memory.request=1Gi",
        "a;b",
        "several_containers",
        ["container.a.", "container.b.", "keep the keys of one, or split the pod"],
    ),
    (
        "nvidia.com/container.a.gpu-memory.request=1Gi;nvidia.com/container.b.gpu-memory.limit=1Gi",
        "a;b",
        "several_containers",
        ["container.a.", "container.b.", "keep the keys of one, or split the pod"],
    ),
    (
        "gpu-fraction-container-name=a;nvidia.com/container.b.gpu-memory.limit=1Gi",
        "a;b",
        "several_containers",
        ["`gpu-fraction-container-name`", "`a`", "to `b`"],
    ),
    (
        "nvidia.com/container.x.gpu-memory.request=1Gi",
        "a;b",
        "container",
        ["container.x.", "`x`", "`a`, `b`"],
    ),
    (
        "gpu-fraction=0.5",
        "main;init:setup nvidia.com/gpu=1",
        "two_kinds",
        ["`gpu-fraction`", "`setup`", "remove one"],
    ),
    (
        "gpu-memory=5",
        "main nvidia.com/mig-1g.5gb=1",
        "two_kinds",
        ["`gpu-memory`", "`nvidia.com/mig-1g.5gb`", "remove one"],
    ),
    (
        "gpu-fraction-container-name=a",
        "a;b nvidia.com/gpu=1",
        "two_kinds",
        ["container-name", "`b`", "remove one"],
    ),
    (
        "gpu-fraction-num-devices=2",
        "main nvidia.com/gpu=1",
        "orphan",
        ["num-devices", "`2`", "remove"],
    ),
    (
        "",
        "a nvidia.com/gpu=1;b nvidia.com/gpu=1",
        "several_requests",
        ["`a`", "`b`", "split the pod"],
    ),
    (
        "",
        "a nvidia.com/gpu=1 nvidia.com/mig-1g.5gb=1",
        "several_requests",
        ["`a`", "mig-1g.5gb", "remove one"],
    ),
    ("", "a nvidia.com/gpu=65", "resource_count", ["`a`", "`65`", "from 1 to 64"]),
    ("", "a nvidia.com/gpu=0.5", "resource_count", ["`a`", "`0.5`", "whole numbers"]),
    ("", "a nvidia.com/gpu.shared=2", "resource_count", ["`a`", "`2`", "from 1 to 1"]),
    ("gpupack.dev/gpu-modle=A100", "main", "unknown_key", ["gpu-modle", "unknown", "correct"]),
    ("gpu-fraction-limits=1", "main", "unknown_key", ["fraction-limits", "unknown", "correct"]),
    ("gpu-memory.max=1", "main", "unknown_key", ["gpu-memory.max", "unknown", "correct"]),
    (
        "nvidia.com/container.main.gpu-memory.requests=1Gi",
        "main",
        "unknown_key",
        ["gpu-memory.requests", "unknown", "correct"],
    ),
];

#[test]
fn every_rejection_names_key_value_and_suggestion() {
    for &(keys, pod, label, parts) in REFUSED {
        let error = parse(keys, pod).expect_err(keys);
        let message = error.to_string();
        assert_eq!(error.label(), label, "{keys}: {message}");
        for part in parts {
            assert!(message.contains(part), "{keys}: `{part}` is not in `{message}`");
        }
        assert!(!error.reason().contains('`'), "{}", error.reason());
    }
}

#[test]
fn overlong_texts_are_not_kept() {
    let name = |bytes: usize| "x".repeat(bytes);
    let refused = |keys: &str, pod: &str| {
        let error = parse(keys, pod).err()?;
        assert!(error.to_string().len() < 300, "{error}");
        Some(error.label())
    };
    for (most, label, keys, pod) in [
        (63, "long_name", "gpu-fraction=0.5;gpu-fraction-container-name=NAME", "NAME"),
        (63, "long_name", "", "NAME nvidia.com/gpu=1"),
        (64, "long_name", "", "main nvidia.com/mig-NAME=1"),
    ] {
        let of = |bytes| (keys.replace("NAME", &name(bytes)), pod.replace("NAME", &name(bytes)));
        let ((keys, pod), (long_keys, long_pod)) = (of(most), of(most + 1));
        assert_eq!(refused(&keys, &pod), None);
        assert_eq!(refused(&long_keys, &long_pod), Some(label));
    }
    let models = |count: usize| {
        format!("gpu-fraction=0.5;gpupack.dev/gpu-model={}", vec!["a"; count].join("|"))
    };
    assert_eq!(refused(&models(32), "main"), None);
    assert_eq!(refused(&models(33), "main"), Some("model"));
    assert_eq!(
        refused(&format!("gpu-fraction=0.5;gpupack.dev/gpu-model=!{}", "a".repeat(99)), "main"),
        Some("model")
    );
    let many: Vec<String> = (0..1_000).map(|at| format!("c-{at}")).collect();
    let error =
        parse("gpu-fraction=0.5;gpu-fraction-container-name=d", &many.join(";")).unwrap_err();
    assert!(error.to_string().len() < 400, "{error}");
}

/// Product names as NVML reports them, and names of MIG instances.
const PRODUCTS: [&str; 16] = [
    "NVIDIA A100-SXM4-80GB",
    "NVIDIA H100 80GB HBM3",
    "NVIDIA H200 NVL",
    "NVIDIA GH200 480GB",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    "NVIDIA RTX 6000 Ada Generation",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 3080 Ti",
    "NVIDIA TITAN X (Pascal)",
    "Quadro RTX 6000",
    "Tesla V100-SXM2-16GB-LS",
    "Tesla M2050 / M2070",
    "NVIDIA L40S",
    "GRID T4-16Q",
    "NVIDIA A100-SXM4-40GB MIG 1g.10gb+me.all",
    "Orin (nvgpu)",
];

#[test]
fn a_model_is_a_name_without_characters_that_mean_nothing() {
    let parsed = |names: &str| parse(&format!("gpu-fraction=0.5;{MODEL}={names}"), "main");
    for product in PRODUCTS {
        let request = parsed(product).unwrap().unwrap();
        assert!(request.models.matches(&ModelName::new(product)), "{product}");
    }
    let all = PRODUCTS.map(|name| name.chars().take(20).collect::<String>()).join(" | ");
    assert_eq!(parsed(&all).map(|request| request.is_some()), Ok(true), "{all}");
    let meaningless = "!=^$*?<>~@#%&,:\\\"'`[]{}\t\u{a0}é";
    for odd in meaningless.chars() {
        for names in [
            format!("{odd}H100"),
            format!("H100{odd}"),
            format!("A{odd}1"),
            format!("A100|{odd}H100"),
        ] {
            assert_eq!(parsed(&names).unwrap_err().label(), "model", "{names}");
        }
    }
    for names in
        ["-H100", "+H100", "(H100", ".", "H100-", "H100+", "H100.", "", " ", "|", "A100|", "||"]
    {
        assert_eq!(parsed(names).unwrap_err().label(), "model", "{names}");
    }
}

#[test]
fn a_long_or_odd_value_is_cut_and_escaped_in_the_message() {
    let mut keys = annotations("");
    keys.insert(FRACTION.to_owned(), format!("a\nb{}", "x".repeat(10_000)));
    let message = parse_request(&keys, &containers("main")).unwrap_err().to_string();
    assert!(message.contains("a\\nbxxx") && message.len() < 300, "{message}");
}

proptest! {
    #[test]
    fn no_annotations_make_the_parser_panic_or_leave_the_ranges(
        keys in proptest::collection::btree_map(
            prop_oneof![
                proptest::sample::select(BARE_KEYS.to_vec()).prop_map(str::to_owned),
                proptest::sample::select(vec![MODEL, POLICY, ISOLATION]).prop_map(str::to_owned),
                Just("nvidia.com/container.main.gpu-memory.request".to_owned()),
                Just("nvidia.com/container.main.gpu-memory.limit".to_owned()),
                "gpupack.dev/.{0,8}",
                ".{0,20}",
            ],
            prop_oneof!["[01]?\\.[0-9]{0,6}", "[0-9]{1,30}", "[0-9.]{1,6}(Gi|Mi|G|k|m|e3)", "main", ".{0,20}"],
            0..6,
        ),
        resources in proptest::collection::btree_map(
            prop_oneof![Just("nvidia.com/gpu".to_owned()), "nvidia.com/mig-.{0,6}", ".{0,8}"],
            prop_oneof!["[0-9]{1,3}", ".{0,8}"],
            0..2,
        ),
    ) {
        let main = ContainerRequest { name: "main".to_owned(), kind: ContainerKind::Regular, resources };
        match parse_request(&keys, &[main]) {
            Ok(Some(request)) => {
                prop_assert!(request.count.get() <= MAX_DEVICES_PER_POD);
                let memory = |memory: MemMib| memory > MemMib::ZERO && memory <= MAX_DEVICE_MEMORY;
                let share = |share: Share| share > Share::ZERO && share <= Share::WHOLE;
                let amount_in_range = match &request.amount {
                    Amount::Fraction(f) => share(*f) && *f < Share::WHOLE,
                    Amount::Memory(m) => memory(*m),
                    Amount::FractionAndMemory(f, m) => share(*f) && memory(*m),
                    Amount::Whole | Amount::MigInstance(_) | Amount::SharedSlot => true,
                };
                prop_assert!(amount_in_range);
                let limit_in_range = match request.limit {
                    Some(Limit::Fraction(f)) => share(f),
                    Some(Limit::Memory(m)) => memory(m),
                    None => true,
                };
                prop_assert!(limit_in_range);
            }
            Ok(None) => {}
            Err(error) => prop_assert!(error.to_string().len() < 4000),
        }
    }
}
