use super::*;
use engine::hardware::pool::{Borrow, InstanceUse, PoolRule, Replicas};
use wire::ids::PoolName;

/// All keys of a section, from the fault of one that it does not have. `a.b` is a section of a section.
pub(crate) fn keys_of(section: &str) -> Vec<String> {
    let parts = section.rsplit('.').filter(|part| !part.is_empty());
    let text = parts.fold("{unknown: 1}".to_owned(), |text, part| format!("{{{part}: {text}}}"));
    let faults = Config::from_yaml(&text).unwrap_err().to_string();
    let (_, keys) = faults.split_once("expected ").unwrap();
    let keys: Vec<String> = keys.split('`').skip(1).step_by(2).map(str::to_owned).collect();
    assert!(!keys.is_empty(), "{faults}");
    keys
}

#[test]
fn an_empty_file_is_the_default() {
    for text in ["", "# nothing\n", "policy:\n"] {
        assert_eq!(Config::from_yaml(text).unwrap(), Config::default(), "{text:?}");
    }
}

#[test]
fn every_key_is_read() {
    let text = "listen: 0.0.0.0:9\nkubeconfig: /k\nscheduler_names: [a, b]\npolicy: spread\n\
        pool_label: p/q\nkeep_best: 0\npools: {a: {replicas: 2, borrow: compute}}\nmodels:\n\
        other_resources: [c/d]\nmin_memory_mib: 8\nmax_limit: 0.5\nfraction_of_mib: 2048\nmemory_by_instance: true\nplaced_events: false\nhold_seconds: 1\nstanding_hold_after_seconds: 7\nstanding_hold_at_most: 0.75\nreport_stale_seconds: 20\n\
        drain_seconds: 40\nscheduler_timeout_seconds: 6\nmax_body_mib: 7\n\
        log_level: debug\nlog_format: json\nlease:\npreemption:\nguard:\nadvice:\nquota:\nshares:\nworkloads:\naccess:\nwebhook:\npage_listen: 0.0.0.0:8\n\
        agents_listen: 0.0.0.0:7\nmetrics_listen: 0.0.0.0:6\nplain_text: true\ntls: {}\ncertificates: {}\nagents:\n\
        allowed_hosts: [A.example]\n";
    let halves = PoolRule {
        replicas: Replicas::new(2),
        instances: InstanceUse::Shared,
        borrow: Borrow::Compute,
        ..PoolRule::default()
    };
    let expected = Config {
        listen: "0.0.0.0:9".parse().unwrap(),
        agents_listen: "0.0.0.0:7".parse().unwrap(),
        page_listen: "0.0.0.0:8".parse().unwrap(),
        metrics_listen: "0.0.0.0:6".parse().unwrap(),
        plain_text: true,
        tls: Some(TlsConfig::default()),
        certificates: Some(CertificatesConfig::default()),
        agents: AgentsConfig::default(),
        allowed_hosts: vec!["a.example".to_owned()],
        kubeconfig: Some(PathBuf::from("/k")),
        scheduler_names: vec!["a".to_owned(), "b".to_owned()],
        policy: Policy::Spread,
        pool_label: "p/q".to_owned(),
        keep_best: None,
        pools: PoolRules::new([(PoolName::new("a"), halves)]),
        models: ModelsConfig::default(),
        other_resources: vec!["c/d".to_owned()],
        min_memory: MemMib::new(8),
        max_limit: Share::from_millionths(500_000),
        fraction_of: Some(MemMib::new(2_048)),
        memory_by_instance: true,
        hold_for: Duration::from_secs(1),
        standing_hold_after: Duration::from_secs(7),
        standing_hold_at_most: Share::from_millionths(750_000),
        stale_after: Duration::from_secs(20),
        recall: Duration::from_secs(8),
        drain_limit: Duration::from_secs(40),
        api_timeout: Duration::from_secs(3),
        scheduler_timeout: Duration::from_secs(6),
        max_body_bytes: 7 << 20,
        placed_events: false,
        log_level: "debug".to_owned(),
        log_format: LogFormat::Json,
        lease: LeaseConfig::default(),
        preemption: PreemptionConfig::default(),
        guard: GuardConfig::default(),
        advice: AdviceConfig::default(),
        quota: QuotaConfig::default(),
        shares: SharesConfig::default(),
        workloads: BTreeMap::new(),
        access: AccessConfig::default(),
        webhook: WebhookConfig::default(),
    };
    assert_eq!(Config::from_yaml(text).unwrap(), expected);
    assert!(keys_of("").iter().all(|key| text.contains(&format!("{key}:"))));
}

#[test]
fn all_faults_are_listed_at_once() {
    let text = "listen: nowhere\npolicy: best\nhold_seconds: 0\nscheduler_names: []\n\
        log_format: xml\npollicy: spread\n7: 8\n";
    let faults = Config::from_yaml(text).unwrap_err();
    assert_eq!(faults.faults.len(), 7, "{faults}");
    for part in ["nowhere", "best", "1 to 300", "at least one", "xml", "`pollicy`"] {
        assert!(faults.to_string().contains(part), "{part} in {faults}");
    }
}

#[test]
fn the_api_server_may_take_half_of_what_kube_scheduler_waits_and_five_seconds() {
    for (scheduler, api) in [(2, 1_000), (5, 2_500), (10, 5_000), (31, 5_000)] {
        let text = format!("scheduler_timeout_seconds: {scheduler}\n");
        let config = Config::from_yaml(&text).unwrap();
        assert_eq!(config.api_timeout, Duration::from_millis(api), "{scheduler}");
    }
}

#[test]
fn a_document_that_is_not_a_mapping_is_rejected() {
    for text in ["- a", "7", "a: [", "\u{0}"] {
        assert_eq!(Config::from_yaml(text).unwrap_err().faults.len(), 1, "{text:?}");
    }
}

#[test]
fn what_can_never_match_is_refused() {
    for (bad, fault) in [
        ("log_level: debgu", "a level"),
        ("log_level: '6'", "a level"),
        ("log_level: info,", "a level"),
        ("log_level: ''", "a level"),
        ("allowed_hosts: ['a:80']", "without a port"),
        ("allowed_hosts: ['http://x']", "without a port"),
        ("allowed_hosts: ['a b']", "without a port"),
        ("allowed_hosts: []", "at least one"),
        ("pool_label: 'a b'", "the key of a label"),
        ("pool_label: ' '", "the key of a label"),
        ("page_listen: here", "`page_listen: here` is not allowed: it must be an address such as"),
        ("scheduler_names: ['x y']", "without spaces"),
        ("scheduler_names: []", "at least one name"),
        ("hold_seconds: !foo 5", "no tag"),
        ("\"a\\e[31m\": 1", "a\\u{1b}[31m"),
        ("guard: [1]", "a mapping of keys to values"),
    ] {
        let said = Config::from_yaml(bad).expect_err(bad).to_string();
        assert!(said.contains(fault), "{bad}: {said}");
    }
    for good in
        ["log_level: debug", "log_level: 'info,gpupack=debug'", "allowed_hosts: ['::1', a.b]"]
    {
        assert!(Config::from_yaml(good).is_ok(), "{good}");
    }
}

#[test]
fn two_bodies_may_be_in_flight() {
    let in_flight = |text: &str| Config::from_yaml(text).unwrap().max_in_flight_bytes() >> 20;
    assert_eq!([in_flight("max_body_mib: 100"), in_flight("")], [200, 64]);
}

#[test]
fn faults_of_shape_and_of_rules_are_listed_together() {
    let text = "kubeconfig: ''\nmax_body_mib: lots\nscheduler_names: [7]\nwebhook:\n  \
        listen: []\n  key_file: ' '\n  lisen: x\n  allowed_sysctls: ['']\n";
    let faults = Config::from_yaml(text).unwrap_err();
    assert_eq!(faults.faults.len(), 7, "{faults}");
    for part in [
        "`kubeconfig: ''`",
        "`max_body_mib: lots` is not allowed: it must be a whole number from 1 to 1024",
        "`scheduler_names: - 7` is not allowed",
        "`webhook.listen: []`",
        "`webhook.key_file: ' '` is not allowed: it must be a text",
        "`webhook.lisen: x` is not allowed: unknown field",
        "`webhook.allowed_sysctls: - ''` is not allowed: it must be a list of names",
    ] {
        assert!(faults.to_string().contains(part), "{part} in {faults}");
    }
}
