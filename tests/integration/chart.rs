//! The Helm chart: what it renders, what it refuses, and that all of it is documented.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use k8s_openapi::ByteString;
use kube_api::config::file::Config;
use kube_api::config::gone;
use kube_api::config::identity::AUDIENCE;
use runtime::certificates::{CertificateFiles, Certificates, ClientCheck, REPLICA_NAME};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde_json::{Value, json};

use crate::harness::chart::{file, folder, helm, missing, namespace, rendered, sets};

/// Whether helm is there; says so if not.
fn has_helm(what: &str) -> bool {
    if let Some(why) = missing() {
        let _shown = writeln!(std::io::stderr(), "skipped: {what} because {why}");
        return false;
    }
    true
}

fn text(path: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

/// The object of this kind and name.
fn find<'a>(objects: &'a [Value], kind: &str, name: &str) -> &'a Value {
    let is_it = |object: &&Value| object["kind"] == kind && object["metadata"]["name"] == name;
    objects.iter().find(is_it).unwrap_or_else(|| panic!("there is no {kind} {name}"))
}

/// `gpupack.yaml` of these objects.
fn configuration(objects: &[Value]) -> Config {
    let map = find(objects, "ConfigMap", "gpupack");
    Config::from_yaml(map["data"]["gpupack.yaml"].as_str().unwrap())
        .unwrap_or_else(|faults| panic!("{faults:?}"))
}

fn pod<'a>(objects: &'a [Value], kind: &str, name: &str) -> &'a Value {
    &find(objects, kind, name)["spec"]["template"]["spec"]
}

/// The arguments of a container.
fn words(container: &Value) -> Vec<String> {
    let all = container["args"].as_array().unwrap().iter();
    all.map(|word| word.as_str().unwrap().to_owned()).collect()
}

/// The container of this name.
fn container<'a>(pod: &'a Value, name: &str) -> &'a Value {
    let all = pod["containers"].as_array().unwrap();
    all.iter().find(|container| container["name"] == name).unwrap_or_else(|| panic!("{name}"))
}

/// Where the Secret, ConfigMap or volume of this name is mounted.
fn mounted<'a>(pod: &'a Value, name: &str) -> &'a Value {
    let mounts = pod["containers"][0]["volumeMounts"].as_array().unwrap();
    &mounts.iter().find(|mount| mount["name"] == name).unwrap()["mountPath"]
}

fn volume<'a>(pod: &'a Value, name: &str) -> &'a Value {
    let volumes = pod["volumes"].as_array().unwrap();
    volumes.iter().find(|volume| volume["name"] == name).unwrap()
}

#[test]
fn the_chart_has_no_fault_that_helm_finds() {
    if !has_helm("the check of the chart") {
        return;
    }
    for set in sets() {
        let (folder, file) = (folder(), file(&set));
        let chart = folder.to_str().unwrap();
        let version = "--kube-version=1.36.0";
        let arguments = ["lint", "--strict", chart, version, "--values", &file];
        helm(&arguments).unwrap_or_else(|fault| panic!("{set}: {fault}"));
    }
}

#[test]
fn the_manifests_are_those_of_the_chart() {
    if !has_helm("the comparison of deploy/*.yaml with the chart") {
        return;
    }
    let written = tempfile::tempdir().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/render");
    let output = Command::new(script).env("RENDER_TO", written.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut names: Vec<String> = std::fs::read_dir(written.path())
        .unwrap()
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names.len(), 16, "{names:?}");
    for name in names {
        let fresh = std::fs::read_to_string(written.path().join(&name)).unwrap();
        assert!(fresh == text(&format!("deploy/{name}")), "run deploy/render: {name} is old");
    }
}

#[test]
fn each_set_of_values_makes_a_valid_configuration() {
    if !has_helm("the configurations of the chart") {
        return;
    }
    for set in sets() {
        let objects = rendered(&set, &[]).unwrap_or_else(|fault| panic!("{set}: {fault}"));
        let config = configuration(&objects);
        let namespace = namespace(&set);
        assert!(config.allowed_hosts.contains(&format!("gpupack.{namespace}.svc")), "{set}");
        assert_eq!(config.lease.namespace, namespace, "{set}");
        assert_eq!(config.exposure_fault(), None, "{set}");
        assert_eq!(config.plain_text, set == "minimal", "only where the value says so");
        assert_eq!(config.tls.is_some(), set != "minimal", "{set}");
        let extender = pod(&objects, "Deployment", "gpupack");
        let ports = &extender["containers"][0]["ports"];
        for (name, address) in [
            ("http", config.listen),
            ("page", config.page_listen),
            ("agents", config.agents_listen),
            ("metrics", config.metrics_listen),
        ] {
            let port = ports.as_array().unwrap().iter().find(|port| port["name"] == name).unwrap();
            assert_eq!(port["containerPort"], address.port(), "{set}");
        }
        let Some(tls) = &config.tls else { continue };
        assert_eq!(
            mounted(extender, "tls"),
            tls.certificate_file.parent().unwrap().to_str().unwrap()
        );
        for name in ["readinessProbe", "livenessProbe"] {
            assert_eq!(extender["containers"][0][name]["httpGet"]["scheme"], "HTTPS", "{set}");
        }
        let agent = pod(&objects, "DaemonSet", "gpupack-agent");
        let arguments = agent["containers"][0]["args"].to_string();
        let address = format!("https://gpupack-replicas.{namespace}.svc:8082");
        assert!(arguments.contains(&address), "{set}: {arguments}");
        let source = &volume(agent, "token")["projected"]["sources"][0]["serviceAccountToken"];
        assert_eq!(source["audience"], AUDIENCE, "{set}");
        let set_of_agents = find(&objects, "DaemonSet", "gpupack-agent");
        assert_eq!(set_of_agents["metadata"]["namespace"], config.agents.namespace, "{set}");
    }
}

#[test]
fn the_second_scheduler_proves_itself_to_the_extender() {
    if !has_helm("the second scheduler of the chart") {
        return;
    }
    for set in sets() {
        let objects = rendered(&set, &[]).unwrap();
        let is_there = |object: &Value| object["metadata"]["name"] == "gpupack-scheduler";
        if ["in-place", "minimal"].contains(&&*set) {
            assert!(!objects.iter().any(is_there), "{set}: the cluster's own scheduler is used");
            assert_eq!(configuration(&objects).scheduler_names, ["default-scheduler"]);
            continue;
        }
        let map = find(&objects, "ConfigMap", "gpupack-scheduler");
        let text = map["data"]["config.yaml"].as_str().unwrap();
        let shown: Value = serde_yaml_ng::from_str(text).unwrap();
        let config = configuration(&objects);
        let profiles = shown["profiles"].as_array().unwrap();
        let names: Vec<&str> =
            profiles.iter().map(|profile| profile["schedulerName"].as_str().unwrap()).collect();
        assert_eq!(names, config.scheduler_names, "{set}");
        let extender = &shown["extenders"][0];
        let address = format!("https://gpupack.{}.svc:8080/v1", namespace(&set));
        assert_eq!(
            (&extender["urlPrefix"], &extender["enableHTTPS"]),
            (&json!(address), &json!(true))
        );
        assert_eq!(extender["httpTimeout"], format!("{}s", config.scheduler_timeout.as_secs()));
        assert_eq!(shown["leaderElection"]["resourceNamespace"], namespace(&set));
        let scheduler = pod(&objects, "Deployment", "gpupack-scheduler");
        let folder = mounted(scheduler, "tls").as_str().unwrap();
        let tls = &extender["tlsConfig"];
        for (key, name) in [("caFile", "ca.crt"), ("certFile", "tls.crt"), ("keyFile", "tls.key")] {
            assert_eq!(tls[key], format!("{folder}/{name}"), "{set}");
            let items = volume(scheduler, "tls")["secret"]["items"].as_array().unwrap();
            assert!(items.iter().any(|item| item["key"] == name), "it waits for {name}");
        }
        assert_eq!(tls["serverName"], REPLICA_NAME, "{set}");
        // What the file says otherwise is kept.
        let shipped: Value =
            serde_yaml_ng::from_str(&self::text("scheduler-config/second-scheduler.yaml")).unwrap();
        assert_eq!(extender["weight"], shipped["extenders"][0]["weight"]);
        assert_eq!(profiles[0]["plugins"], shipped["profiles"][0]["plugins"]);
    }
}

#[test]
fn another_namespace_is_named_everywhere() {
    if !has_helm("another namespace") {
        return;
    }
    let everything = [
        "--set",
        "rbac.evict=true,rbac.probe=true,networkPolicies.enabled=true,agents.metrics=true",
        "--set",
        "networkPolicies.apiServerCidrs={192.0.2.10/32}",
        "--set",
        "monitoring.serviceMonitor=true,monitoring.podMonitor=true,dashboards.enabled=true",
    ];
    for more in [
        &[][..],
        &["--set", "certificates.source=helm"],
        &["--set", "certificates.source=cert-manager"],
    ] {
        let more: Vec<&str> = more.iter().chain(&everything).copied().collect();
        let objects = rendered("other-namespace", &more).unwrap();
        for object in &objects {
            let text = object.to_string();
            for shipped in ["gpu-system", "gpupack-agents"] {
                assert!(!text.contains(shipped), "{shipped} is in {text}");
            }
            for subject in object["subjects"].as_array().into_iter().flatten() {
                assert_eq!(subject["namespace"], "other", "{object}");
            }
        }
        let policy = find(&objects, "ValidatingAdmissionPolicy", "gpupack-extender").to_string();
        assert!(policy.contains("'system:serviceaccount:other:gpupack'"), "{policy}");
        assert!(policy.contains("request.namespace == 'other'"), "{policy}");
    }
}

#[test]
fn values_with_faults_are_refused() {
    if !has_helm("faults in values") {
        return;
    }
    for (values, part) in [
        ("extender.replica=2", "'replica' not allowed"),
        ("extenders.replicas=2", "'extenders' not allowed"),
        ("extender.replicas=two", "got string, want integer"),
        ("extender.replicas=0", "minimum: got 0, want 1"),
        ("agents.mps=on", "'off', 'rely', 'manage'"),
        ("certificates.source=vault", "'gpupack', 'helm', 'cert-manager', 'existing'"),
        ("config.listen=0.0.0.0:80", "'/config/listen': false schema"),
        ("config.lease.namespace=mine", "'/config/lease/namespace': false schema"),
        ("image.digest=sha256:1", "does not match pattern"),
        ("agents.resources.limit.memory=1Gi", "'limit' not allowed"),
        ("tls.enabled=perhaps", "got string, want boolean"),
        ("tls.enabled=false", "certificates.source"),
        ("tls.enabled=false,certificates.source=existing", "certificates.existing.ca"),
        ("config.guard.evict=true,rbac.evict=false", "rbac.evict"),
        ("config.preemption.enabled=true,rbac.evict=false", "rbac.evict"),
        ("config.pools.a.borrow=compute", "set rbac.moves: true"),
        ("config.pools.a.borrow=memory", "set rbac.moves: true"),
        ("config.webhook.memory_limit=mps", "agents.mps"),
        ("agents.memoryLimits=write", "'read', 'set'"),
        ("agents.memoryLimits=set", "set agents.privileged: true"),
        (
            "config.webhook.memory_limit=driver,config.pools.a.borrow=memory,rbac.moves=true",
            "set agents.memoryLimits: set",
        ),
        (
            "config.certificates.certificate_seconds=90,certificates.source=helm",
            "config.certificates",
        ),
        ("monitoring.podMonitor=true", "agents.metrics"),
        ("agents.namespace.name=gpu-system", "a namespace of their own"),
        ("priorityClass.create=true", "system-"),
        ("workloads.enabled=true,config.workloads.train.policy=spread", "workloads.classes"),
        ("workloads.classes.train=100", "/workloads/classes/train"),
        ("networkPolicies.enabled=true", "networkPolicies.apiServerCidrs"),
        (
            "networkPolicies.enabled=true,inPlace=true,apiService.enabled=false",
            "networkPolicies.schedulerCidrs",
        ),
        (
            "networkPolicies.enabled=true,inPlace=true,networkPolicies.schedulerCidrs={0.0.0.0/0},\
             tls.enabled=false,certificates.source=helm",
            "networkPolicies.schedulerCidrs",
        ),
        ("certificates.names={gpupack.example.}", "/certificates/names/0"),
        ("clusterDomain=example.", "/clusterDomain"),
        ("webhook.toleratedTaints={node.kubernetes.io/unschedulable}", "'not' failed"),
        ("webhook.toleratedTaints={kubernetes.io/gpu}", "'not' failed"),
    ] {
        let refused = rendered("default", &["--set", values]).expect_err(values);
        assert!(refused.contains(part), "{values}: {refused}");
    }
}

#[test]
fn what_is_gone_is_refused_before_it_is_installed() {
    if !has_helm("what is gone") {
        return;
    }
    let of_agents = ["migSwitch", "migReset", "mpsProtocol"];
    // The chart writes the sections `tls` and `agents`: no value sets them.
    let is_value =
        |gone: &&gone::Gone| !gone.name.starts_with("tls.") && !gone.name.starts_with("agents.");
    let of_config = gone::KEYS.iter().filter(is_value).map(|gone| {
        let path = format!("config.{}", gone.name.replace('*', "a"));
        (format!("{path}={}", gone.value.unwrap_or("true")), path, gone.advice)
    });
    let of_agents = of_agents.map(|key| (format!("agents.{key}=1"), format!("agents.{key}"), ""));
    for (values, path, advice) in of_config.chain(of_agents) {
        let refused = rendered("default", &["--set", &values]).expect_err(&values);
        assert!(refused.contains(&path) && refused.contains(advice), "{values}: {refused}");
        assert!(refused.contains(" is gone: "), "{values}: {refused}");
    }
}

/// `helm upgrade --reuse-values` brings the defaults of the version before, and `null` drops a value.
#[test]
fn old_defaults_and_null_are_ignored_and_all_that_is_gone_is_named_at_once() {
    if !has_helm("old defaults") {
        return;
    }
    for values in [
        "agents.migSwitch=false,agents.migReset=false,agents.mpsProtocol=2",
        "agents.migSwitch=null,config.warm_up_seconds=null,config.certificates.ca_seconds=null",
    ] {
        let objects = rendered("default", &["--set", values]).expect(values);
        let _ = configuration(&objects); // the extender takes it, too
    }
    let values = "agents.migSwitch=true,agents.mpsProtocol=3,config.warm_up_seconds=3";
    let refused = rendered("default", &["--set", values]).expect_err(values);
    for part in ["migSwitch", "mpsProtocol", "warm_up_seconds", "--reset-then-reuse-values"] {
        assert!(refused.contains(part), "{part}: {refused}");
    }
}

#[test]
fn classes_of_workloads_are_priority_classes_and_configuration() {
    if !has_helm("classes of workloads") {
        return;
    }
    let own = "workloads.enabled=true,workloads.classes.batch.priority=-5,\
               workloads.classes.batch.priority_class=low,workloads.classes.plain.policy=binpack";
    let objects = rendered("default", &["--set", own]).unwrap();
    let config = configuration(&objects);
    let made: BTreeMap<&str, i64> = objects
        .iter()
        .filter(|object| object["kind"] == "PriorityClass")
        .map(|it| (it["metadata"]["name"].as_str().unwrap(), it["value"].as_i64().unwrap()))
        .collect();
    let named: BTreeMap<String, i64> = config
        .workloads
        .iter()
        .filter_map(|(name, keys)| Some((keys.class(name), i64::from(keys.priority?))))
        .collect();
    assert_eq!(
        named.iter().map(|(name, value)| (&**name, *value)).collect::<BTreeMap<_, _>>(),
        made
    );
    let all =
        [("gpupack-notebook", 200), ("gpupack-serve", 300), ("gpupack-train", 100), ("low", -5)];
    assert_eq!(made, BTreeMap::from(all));
    assert!(config.workloads.contains_key("plain"), "its PriorityClass is made by others");
    let objects = rendered("default", &[]).unwrap();
    assert!(objects.iter().all(|object| object["kind"] != "PriorityClass"));
    assert!(configuration(&objects).workloads.is_empty());
}

#[test]
fn pods_start_again_with_another_configuration() {
    if !has_helm("changes of the configuration") {
        return;
    }
    let sum = |more: &[&str], name: &str| {
        let objects = rendered("default", more).unwrap();
        let template = &find(&objects, "Deployment", name)["spec"]["template"];
        template["metadata"]["annotations"]["checksum/config"].as_str().unwrap().to_owned()
    };
    for (name, value) in [
        ("gpupack", "config.policy=spread"),
        ("gpupack-webhook", "config.min_memory_mib=128"),
        ("gpupack-scheduler", "scheduler.ignoredResources={nvidia.com/mig-9g.9gb}"),
    ] {
        assert_eq!(sum(&[], name), sum(&["--set", "dashboards.enabled=true"], name));
        assert_ne!(sum(&[], name), sum(&["--set", value], name), "{value}");
    }
}

#[test]
fn kube_scheduler_starts_again_with_another_ca_that_the_chart_knows() {
    if !has_helm("changes of the CA") {
        return;
    }
    let sum = |values: &str| {
        let objects = rendered("default", &["--set", values]).unwrap();
        let template = &find(&objects, "Deployment", "gpupack-scheduler")["spec"]["template"];
        template["metadata"]["annotations"]["checksum/ca"].as_str().map(str::to_owned)
    };
    let existing =
        |ca: &str| sum(&format!("certificates.source=existing,certificates.existing.ca={ca}"));
    assert!(existing("ONE").is_some());
    assert_ne!(existing("ONE"), existing("TWO"));
    assert!(sum("certificates.source=helm").is_some());
    // Here the extender sets an annotation.
    assert_eq!(sum("certificates.source=gpupack"), None);
    assert_eq!(sum("certificates.source=cert-manager"), None);
}

#[test]
fn agents_and_the_webhook_learn_which_taints_are_tolerated() {
    if !has_helm("taints") {
        return;
    }
    // A key that YAML would read as something else, too.
    let taints = r#"webhook.toleratedTaints=["example.com/gpu","true"]"#;
    let objects = rendered("default", &["--set-json", taints]).unwrap();
    let agent = pod(&objects, "DaemonSet", "gpupack-agent");
    for key in ["example.com/gpu", "true"] {
        let tolerated = json!({"key": key, "operator": "Exists"});
        assert!(agent["tolerations"].as_array().unwrap().contains(&tolerated), "{agent}");
    }
    let tolerated = configuration(&objects).webhook.tolerated_taints;
    assert_eq!(tolerated, ["example.com/gpu", "true"]);
}

#[test]
fn agents_set_limits_of_memory_only_if_the_value_says_so() {
    if !has_helm("limits of memory in the chart") {
        return;
    }
    for (values, is_on) in [
        ("agents.privileged=true", false),
        ("agents.privileged=true,agents.memoryLimits=set", true),
    ] {
        let objects = rendered("default", &["--set", values]).unwrap();
        let agent = pod(&objects, "DaemonSet", "gpupack-agent");
        let arguments = container(agent, "driver")["args"].to_string();
        assert_eq!(arguments.contains("--memory-limits=set"), is_on, "{arguments}");
    }
}

#[test]
fn agents_make_mig_instances_only_if_the_value_says_so() {
    if !has_helm("MIG on demand in the chart") {
        return;
    }
    for (value, is_on) in [("false", false), ("true", true)] {
        let set = format!("agents.migOnDemand={value}");
        let objects = rendered("default", &["--set", &set]).unwrap();
        let agent = pod(&objects, "DaemonSet", "gpupack-agent");
        let container = container(agent, if is_on { "driver" } else { "agent" });
        assert_eq!(container["args"].to_string().contains("--mig-on-demand"), is_on);
        assert_eq!(container["env"].to_string().contains("NVIDIA_MIG_CONFIG_DEVICES"), is_on);
        assert_eq!(container["securityContext"]["privileged"] == true, is_on);
        assert!(!container["args"].to_string().contains("--mig-adopt"));
        if is_on {
            assert_eq!(volume(agent, "mig")["hostPath"]["path"], "/run/gpupack/mig");
            let mounts = container["volumeMounts"].as_array().unwrap();
            let mount = mounts.iter().find(|mount| mount["name"] == "mig").unwrap();
            assert_eq!(mount["mountPath"], "/run/gpupack/mig");
        }
    }
    let both = "agents.migOnDemand=true,agents.migAdopt=true";
    let agent = rendered("default", &["--set", both]).unwrap();
    let agent = pod(&agent, "DaemonSet", "gpupack-agent");
    assert!(container(agent, "driver")["args"].to_string().contains("--mig-adopt"));
    // Without Helm, a manifest of its own has the same.
    let agent = rendered("default", &["--set", "agents.migOnDemand=true"]).unwrap();
    let agent = find(&agent, "DaemonSet", "gpupack-agent");
    let plain: Value = serde_yaml_ng::from_str(&text("deploy/agent-mig.yaml")).unwrap();
    for key in ["args", "env", "securityContext", "volumeMounts"] {
        let of = |agent: &Value| {
            let pod = &agent["spec"]["template"]["spec"];
            ["agent", "driver"].map(|name| container(pod, name)[key].clone())
        };
        assert_eq!(of(&plain), of(agent), "{key}");
    }
}

#[test]
fn rights_are_in_a_container_without_port_and_token() {
    if !has_helm("the check of the agents' rights") {
        return;
    }
    let objects = rendered("default", &[]).unwrap();
    let alone = pod(&objects, "DaemonSet", "gpupack-agent");
    assert_eq!(alone["containers"].as_array().unwrap().len(), 1, "without rights there is one");
    assert_eq!(
        container(alone, "agent")["securityContext"]["capabilities"]["drop"],
        json!(["ALL"])
    );
    let more = "agents.extraArgs={--log-level=debug,--kubelet-socket=/s,--ignore-xids=63}";
    for rights in [
        "agents.privileged=true",
        "agents.privileged=true,agents.memoryLimits=set",
        "agents.mps=rely",
        "agents.mps=manage",
        "agents.migOnDemand=true",
        "agents.migOnDemand=true,agents.kubeletSocket=true,agents.migAdopt=true",
    ] {
        let flags = ["--set", rights, "--set", "agents.metrics=true", "--set", more];
        let objects = rendered("default", &flags).unwrap();
        let pod = pod(&objects, "DaemonSet", "gpupack-agent");
        let names = pod["containers"].as_array().unwrap().iter().map(|it| it["name"].clone());
        assert_eq!(names.collect::<Vec<_>>(), ["agent", "driver"], "{rights}");
        let (agent, driver) = (container(pod, "agent"), container(pod, "driver"));
        let mounts = |of: &Value| {
            let all = of["volumeMounts"].as_array().unwrap().iter();
            all.map(|mount| mount["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        let variable = |of: &Value, name: &str| {
            let mut all = of["env"].as_array().unwrap().iter();
            all.find(|variable| variable["name"] == name).map(|it| it["value"].clone())
        };

        let security = &agent["securityContext"];
        let is_root = rights.contains("kubeletSocket");
        assert_eq!(security["privileged"], Value::Null, "{rights}");
        assert_eq!(security["capabilities"]["drop"], json!(["ALL"]), "{rights}");
        assert_eq!(security["allowPrivilegeEscalation"], false, "{rights}");
        assert_eq!(security["runAsNonRoot"] == true, !is_root, "{rights}");
        assert_eq!(variable(agent, "NVIDIA_VISIBLE_DEVICES"), Some(json!("void")), "{rights}");
        let own = mounts(agent);
        assert!(own.contains(&"token".to_owned()) && own.contains(&"driver".to_owned()));
        assert!(!own.iter().any(|name| ["mps", "mps-shm", "mig"].contains(&&**name)), "{own:?}");

        assert_eq!(driver["securityContext"]["privileged"], true, "{rights}");
        assert_eq!(driver["securityContext"]["readOnlyRootFilesystem"], true, "{rights}");
        assert_eq!(variable(driver, "NVIDIA_VISIBLE_DEVICES"), Some(json!("all")), "{rights}");
        for absent in ["ports", "readinessProbe", "livenessProbe"] {
            assert_eq!(driver[absent], Value::Null, "{rights}: {absent}");
        }
        let own = mounts(driver);
        let others = ["token", "ca", "pod-resources"];
        assert!(!own.iter().any(|name| others.contains(&&**name)), "{own:?}");
        let said = words(driver);
        assert_eq!(said[0], "driver");
        let network = ["--extender", "--ca-file", "--token-file", "--metrics-listen"];
        assert!(!said.iter().any(|word| network.contains(&&**word)), "{said:?}");
        assert!(said.contains(&"--ignore-xids=63".to_owned()));
        assert!(!said.contains(&"--kubelet-socket=/s".to_owned()), "{said:?}");
        assert!(words(agent).contains(&"--kubelet-socket=/s".to_owned()));

        // Both name one socket, in a folder that only they mount.
        let value = |words: &[String], flag: &str| {
            words.windows(2).find(|pair| pair[0] == flag).unwrap()[1].clone()
        };
        assert_eq!(value(&words(agent), "--driver-socket"), value(&said, "--socket"));
        assert_eq!(volume(pod, "driver")["emptyDir"]["medium"], "Memory");
        let first = pod["initContainers"].as_array().into_iter().flatten();
        assert!(!first.flat_map(mounts).any(|name| name == "driver"), "{rights}");
    }
}

#[test]
fn an_empty_list_of_runtime_classes_is_no_default() {
    if !has_helm("RuntimeClasses of the chart") {
        return;
    }
    let none = ["--set-json", "config.webhook.runtime_classes_without_gpus=[]"];
    for (more, classes) in [(&none[..], "['']"), (&[], "['', 'crun', 'kata', 'runc']")] {
        let objects = rendered("default", more).unwrap();
        let condition = format!("object.spec.runtimeClassName in {classes})");
        for (kind, name) in [
            ("MutatingWebhookConfiguration", "gpupack"),
            ("ValidatingAdmissionPolicy", "gpupack-devices"),
        ] {
            let text = find(&objects, kind, name).to_string();
            assert!(text.contains(&condition), "{text}");
        }
        let given = configuration(&objects).webhook.runtime_classes_without_gpus;
        assert_eq!(given.is_empty(), classes == "['']");
    }
}

#[test]
fn a_drain_of_a_node_is_never_blocked() {
    if !has_helm("the disruption budgets of the chart") {
        return;
    }
    let objects = rendered("default", &["--set", "webhook.replicas=1"]).unwrap();
    for name in ["gpupack", "gpupack-scheduler", "gpupack-webhook"] {
        let spec = &find(&objects, "PodDisruptionBudget", name)["spec"];
        assert_eq!(spec["maxUnavailable"], 1, "{name}");
    }
}

#[test]
fn the_extender_has_its_name_in_another_domain() {
    if !has_helm("another domain of the cluster") {
        return;
    }
    for (set, names) in
        [("other-namespace", &["gpupack.other.svc.example.internal"][..]), ("default", &[])]
    {
        let config = configuration(&rendered(set, &[]).unwrap());
        assert_eq!(config.certificates.unwrap().names, names, "{set}");
    }
}

/// Nothing reaches an APIService behind a closed port, and then no namespace can be deleted.
#[test]
fn the_api_server_reaches_the_page_through_network_policies() {
    if !has_helm("network policies of the chart") {
        return;
    }
    let page = json!([{"port": "page", "protocol": "TCP"}]);
    for (range, from) in [
        ("0.0.0.0/0", None),
        ("192.0.2.10/32", Some(json!([{"ipBlock": {"cidr": "192.0.2.10/32"}}]))),
    ] {
        let cidrs =
            format!("networkPolicies.enabled=true,networkPolicies.apiServerCidrs={{{range}}}");
        let objects = rendered("default", &["--set", &cidrs]).unwrap();
        let rules = &find(&objects, "NetworkPolicy", "gpupack")["spec"]["ingress"];
        let rule = rules.as_array().unwrap().iter().find(|rule| rule["ports"] == page).unwrap();
        assert_eq!(rule.get("from"), from.as_ref(), "{range}");
        let is_of_webhook = |object: &Value| {
            object["kind"] == "NetworkPolicy" && object["metadata"]["name"] == "gpupack-webhook"
        };
        assert_eq!(objects.iter().any(is_of_webhook), from.is_some(), "{range}");
    }
    // The same for the cluster's own kube-scheduler, and for no other.
    let verbs = json!({"ports": [{"port": "http", "protocol": "TCP"}]});
    for (set, is_open) in [("in-place", true), ("default", false)] {
        let cidrs = "networkPolicies.enabled=true,networkPolicies.apiServerCidrs={0.0.0.0/0},\
            networkPolicies.schedulerCidrs={0.0.0.0/0}";
        let objects = rendered(set, &["--set", cidrs]).unwrap();
        let rules = &find(&objects, "NetworkPolicy", "gpupack")["spec"]["ingress"];
        assert_eq!(rules.as_array().unwrap().contains(&verbs), is_open, "{set}: {rules}");
    }
    let closed = "tls.enabled=false,certificates.source=helm,networkPolicies.enabled=true,\
        networkPolicies.apiServerCidrs={0.0.0.0/0}";
    let objects = rendered("default", &["--set", closed]).unwrap();
    let rules = &find(&objects, "NetworkPolicy", "gpupack")["spec"]["ingress"];
    let is_open = |rule: &Value| rule.get("from").is_none();
    assert!(!rules.as_array().unwrap().iter().any(is_open), "in plain text: {rules}");
}

#[test]
fn helm_test_runs_doctor_with_rights_that_only_read() {
    if !has_helm("the test of the chart") {
        return;
    }
    for (set, role) in [
        ("webhook.enabled=true", "gpupack-doctor"),
        ("webhook.enabled=false", "gpupack-view"),
        ("policies.enabled=false", "gpupack-view"),
        ("agents.enabled=false", "gpupack-view"),
    ] {
        let objects = rendered("default", &["--set", set]).unwrap();
        let bound = &find(&objects, "ClusterRoleBinding", "gpupack-test")["roleRef"]["name"];
        assert_eq!(bound, role, "{set}");
        let containers = &find(&objects, "Pod", "gpupack-test")["spec"]["containers"];
        let commands: Vec<&Value> =
            containers.as_array().unwrap().iter().map(|container| &container["args"]).collect();
        let runs_doctor =
            commands.iter().any(|args| args[0] == "doctor" && args[1] == "--accept-unchecked");
        assert_eq!(runs_doctor, role == "gpupack-doctor", "{set}: {commands:?}");
        let asks = commands.iter().any(|args| args[2] == "--require-reports");
        assert!(asks, "{set}: {commands:?}");
        // The image of the agent has no such program.
        let image = &find(&objects, "Deployment", "gpupack")["spec"]["template"]["spec"]["containers"]
            [0]["image"];
        assert!(
            containers.as_array().unwrap().iter().all(|container| &container["image"] == image),
            "{containers}"
        );
        for rule in find(&objects, "ClusterRole", role)["rules"].as_array().unwrap() {
            let (verbs, resources) = (rule["verbs"].as_array().unwrap(), &rule["resources"]);
            let is_review = resources == &json!(["subjectaccessreviews"]); // changes nothing
            let reads = |verb: &Value| verb == "get" || verb == "list" || is_review;
            assert!(verbs.iter().all(reads), "{rule}");
            assert!(!rule["resources"].as_array().unwrap().contains(&json!("secrets")), "{rule}");
        }
    }
    // In plain text the extender is asked through the service proxy.
    let plain = "tls.enabled=false,certificates.source=helm";
    let objects = rendered("default", &["--set", plain]).unwrap();
    assert_eq!(find(&objects, "RoleBinding", "gpupack-test")["roleRef"]["name"], "gpupack-view");
    let containers = &find(&objects, "Pod", "gpupack-test")["spec"]["containers"];
    let args = containers.to_string();
    assert_eq!(args.matches(r#""--service","gpu-system/gpupack:page""#).count(), 2, "{args}");
}

#[test]
fn templates_of_configured_kinds_are_sent_to_the_webhook() {
    if !has_helm("the kinds with templates of the chart") {
        return;
    }
    let kinds = r#"config.webhook.templates={"jobsets.jobset.x-k8s.io":["spec/a/template"],"a.b":["spec/c"]}"#;
    for (more, expected) in [
        (&[][..], &[("batch", "jobs")][..]),
        (&["--set-json", kinds], &[("batch", "jobs"), ("b", "a"), ("jobset.x-k8s.io", "jobsets")]),
    ] {
        let objects = rendered("default", more).unwrap();
        let webhooks = &find(&objects, "MutatingWebhookConfiguration", "gpupack")["webhooks"];
        let [pods, templates] = [&webhooks[0], &webhooks[1]];
        let of = |rule: &Value| {
            let part = |name: &str| rule[name][0].as_str().unwrap().to_owned();
            (part("apiGroups"), part("resources"))
        };
        let sent: Vec<_> = templates["rules"].as_array().unwrap().iter().map(of).collect();
        let expected: Vec<_> =
            expected.iter().map(|(group, name)| ((*group).into(), (*name).into())).collect();
        assert_eq!(sent, expected);
        assert_eq!(configuration(&objects).webhook.templates.len(), sent.len() - 1);
        assert_eq!(templates["failurePolicy"], "Ignore", "pods are checked anyway");
        assert_eq!(pods["failurePolicy"], "Fail");
        assert_eq!(templates["namespaceSelector"], pods["namespaceSelector"]);
    }
}

/// Secrets that others fill have no contents: an upgrade would put them back.
#[test]
fn what_the_extender_fills_has_no_contents() {
    if !has_helm("Secrets of the chart") {
        return;
    }
    let objects = rendered("default", &[]).unwrap();
    for (kind, name) in [
        ("Secret", "gpupack-ca"),
        ("Secret", "gpupack-extender-tls"),
        ("Secret", "gpupack-scheduler-tls"),
        ("Secret", "gpupack-webhook-tls"),
        ("ConfigMap", "gpupack-ca"),
    ] {
        let object = find(&objects, kind, name);
        assert!(object.get("data").is_none() && object.get("stringData").is_none(), "{object}");
    }
    let webhooks = find(&objects, "MutatingWebhookConfiguration", "gpupack")["webhooks"].clone();
    for webhook in webhooks.as_array().unwrap() {
        assert_eq!(webhook["clientConfig"].get("caBundle"), None);
    }
    let service = find(&objects, "APIService", "v1.inspection.gpupack.dev");
    assert_eq!(service["spec"].get("caBundle"), None);
    // With a CA that the chart knows, both have it.
    for set in ["helm-certificates", "default"] {
        let known = ["--set", "certificates.source=existing,certificates.existing.ca=PEM"];
        let more = if set == "default" { &known[..] } else { &[] };
        let objects = rendered(set, more).unwrap();
        let webhooks = &find(&objects, "MutatingWebhookConfiguration", "gpupack")["webhooks"];
        let bundle = &webhooks[0]["clientConfig"]["caBundle"];
        assert_eq!(webhooks[1]["clientConfig"]["caBundle"], *bundle, "{set}");
        let service = find(&objects, "APIService", "v1.inspection.gpupack.dev");
        assert!(bundle.is_string() && service["spec"]["caBundle"] == *bundle, "{set}");
        assert!(find(&objects, "ConfigMap", "gpupack-ca")["data"]["ca.crt"].is_string(), "{set}");
    }
}

#[test]
fn helm_makes_certificates_that_each_part_can_use() {
    if !has_helm("certificates of Helm") {
        return;
    }
    let objects = rendered("helm-certificates", &[]).unwrap();
    for (name, is_client) in [("extender", true), ("scheduler", true), ("webhook", false)] {
        let secret = find(&objects, "Secret", &format!("gpupack-{name}-tls"));
        let folder = tempfile::tempdir().unwrap();
        let path = |file: &str| folder.path().join(file);
        for file in ["tls.crt", "tls.key", "ca.crt"] {
            let ByteString(bytes) = serde_json::from_value(secret["data"][file].clone()).unwrap();
            std::fs::write(path(file), bytes).unwrap();
        }
        let files = CertificateFiles {
            own: Some((path("tls.crt"), path("tls.key"))),
            ca: Some(path("ca.crt")),
            read_every: Duration::from_secs(10),
        };
        Certificates::read(files).unwrap_or_else(|fault| panic!("{name}: {fault}"));
        let chain = std::fs::read(path("tls.crt")).unwrap();
        let chain: Vec<CertificateDer<'static>> =
            CertificateDer::pem_slice_iter(&chain).collect::<Result<_, _>>().unwrap();
        let check = ClientCheck::of_ca(&std::fs::read(path("ca.crt")).unwrap()).unwrap();
        assert!(!is_client || check.accepts(&chain), "{name}");
        let map = find(&objects, "ConfigMap", "gpupack-ca")["data"]["ca.crt"].as_str().unwrap();
        assert_eq!(map.trim(), std::fs::read_to_string(path("ca.crt")).unwrap().trim());
    }
}

#[test]
fn helm_makes_certificates_only_for_what_is_installed() {
    if !has_helm("parts without certificates") {
        return;
    }
    for (values, expected) in [
        ("webhook.enabled=false", &["gpupack-extender-tls", "gpupack-scheduler-tls"][..]),
        ("tls.enabled=false", &["gpupack-webhook-tls"]),
        ("tls.enabled=false,webhook.enabled=false", &[]),
    ] {
        let objects = rendered("helm-certificates", &["--set", values]).unwrap();
        let secrets = objects.iter().filter(|object| object["kind"] == "Secret");
        let names: BTreeSet<&str> =
            secrets.map(|secret| secret["metadata"]["name"].as_str().unwrap()).collect();
        let expected: BTreeSet<&str> = expected.iter().copied().collect();
        assert_eq!(names, expected, "{values}");
    }
}

/// Leaves of the values: what is a mapping there is one of keys, unless the schema leaves its keys open.
fn leaves(values: &Value, schema: &Value, path: &str, found: &mut BTreeMap<String, Value>) {
    let properties = schema["properties"].as_object();
    let is_closed = schema["additionalProperties"] == false;
    let (Some(properties), Some(map), true) = (properties, values.as_object(), is_closed) else {
        found.insert(path.to_owned(), values.clone());
        return;
    };
    // A mapping whose keys are a user's to leave out.
    if map.is_empty() || path.ends_with("resources") {
        found.insert(path.to_owned(), values.clone());
        return;
    }
    let keys: BTreeSet<&String> = map.keys().collect();
    let is_known = |key: &&String| *key != "global" && properties[*key]["deprecated"] != true; // or gone
    let known: BTreeSet<&String> = properties.keys().filter(is_known).collect();
    assert_eq!(keys, known, "values.yaml and values.schema.json differ below `{path}`");
    for (key, value) in map {
        let below = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        leaves(value, &properties[key], &below, found);
    }
}

/// A default as the table has it.
fn written(default: &Value) -> String {
    match default {
        Value::String(text) if text.is_empty() => "empty".to_owned(),
        Value::String(text) => format!("`{text}`"),
        Value::Object(map) if map.is_empty() => "none".to_owned(),
        Value::Array(list) if list.is_empty() => "none".to_owned(),
        other => {
            let parts = other.to_string().replace('"', "").replace(',', ", ");
            let spaced = parts.replace(':', ": ");
            format!("`{spaced}`")
        }
    }
}

#[test]
fn every_value_is_in_the_schema_and_the_documentation() {
    let values: Value = serde_yaml_ng::from_str(&text("deploy/helm/gpupack/values.yaml")).unwrap();
    let schema = text("deploy/helm/gpupack/values.schema.json");
    let schema: Value = serde_json::from_str(&schema).unwrap();
    let mut found = BTreeMap::new();
    leaves(&values, &schema, "", &mut found);
    let documented: BTreeMap<String, String> = text("docs/install.md")
        .lines()
        .skip_while(|line| !line.starts_with("| Value |"))
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .map(|line| {
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            (cells[1].trim_matches('`').to_owned(), cells[2].to_owned())
        })
        .collect();
    let shipped: BTreeMap<String, String> =
        found.iter().map(|(key, value)| (key.clone(), written(value))).collect();
    assert_eq!(documented, shipped);
}

#[test]
fn agents_have_probes_whose_port_shows_no_figures() {
    if !has_helm("the check of the agents' probes") {
        return;
    }
    for set in ["default", "mps", "everything"] {
        let objects = rendered(set, &[]).unwrap();
        let agents = find(&objects, "DaemonSet", "gpupack-agent");
        assert!(agents["spec"]["minReadySeconds"].as_u64().unwrap() >= 10, "{set}");
        let agent = container(pod(&objects, "DaemonSet", "gpupack-agent"), "agent");
        let (live, ready) = (&agent["livenessProbe"], &agent["readinessProbe"]);
        assert_eq!(live["httpGet"], json!({"path": "/livez", "port": "probes"}), "{set}");
        assert_eq!(ready["httpGet"], json!({"path": "/readyz", "port": "probes"}), "{set}");
        let seconds = |name: &str| live[name].as_u64().unwrap();
        assert_eq!(seconds("periodSeconds") * seconds("failureThreshold"), 120, "{set}");
        let ports = agent["ports"].as_array().unwrap();
        let probes = ports.iter().find(|port| port["name"] == "probes").unwrap();
        let args: Vec<&str> =
            agent["args"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
        let listens = format!("0.0.0.0:{}", probes["containerPort"]);
        assert!(args.windows(2).any(|pair| pair == ["--probes-listen", &listens]), "{args:?}");
    }
    let objects = rendered("everything", &[]).unwrap();
    let policy = find(&objects, "NetworkPolicy", "gpupack-agent");
    let rules = policy["spec"]["ingress"].as_array().unwrap();
    let open = rules.iter().find(|rule| rule["from"].is_null()).unwrap();
    assert_eq!(open["ports"], json!([{"port": "probes", "protocol": "TCP"}]), "kubelet passes");
}

#[test]
fn agents_wait_for_the_operators_toolkit_where_that_is_set() {
    if !has_helm("the check of the agents' first container") {
        return;
    }
    let objects = rendered("default", &[]).unwrap();
    assert!(pod(&objects, "DaemonSet", "gpupack-agent")["initContainers"].is_null());
    let objects = rendered("mps", &["--set", "agents.waitForToolkit=true"]).unwrap();
    let pod = pod(&objects, "DaemonSet", "gpupack-agent");
    let first = &pod["initContainers"][0];
    assert_eq!(first["name"], "toolkit", "before the memory of MPS");
    let script = first["args"][0].as_str().unwrap();
    assert!(script.contains("/run/nvidia/validations/toolkit-ready"), "{script}");
    assert_eq!(first["securityContext"]["capabilities"]["drop"], json!(["ALL"]));
    let mount = &first["volumeMounts"][0];
    assert_eq!(mount["mountPropagation"], "HostToContainer");
    let folder = &volume(pod, mount["name"].as_str().unwrap())["hostPath"];
    let expected = json!({"path": "/run/nvidia/validations", "type": "DirectoryOrCreate"});
    assert_eq!(folder, &expected);
}
