//! What a pod may set besides a GPU.

use serde_json::{Value, json};

use super::tests::{VOID, admitted, answered, env, half, pod, review, rules, shipped};
use super::*;

#[test]
fn an_amount_of_zero_leaves_no_pod_to_kubelet() {
    for zero in ["0", "0k"] {
        for resource in ["nvidia.com/gpu", "nvidia.com/mig-1g.5gb", "nvidia.com/x"] {
            let taking = pod(json!({}), |pod| {
                pod["spec"]["runtimeClassName"] = "nvidia".into();
                pod["spec"]["containers"][0]["resources"] = json!({"limits": {resource: zero}});
                pod["spec"]["containers"][0]["env"] =
                    json!([{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]);
            });
            let message = admitted(&shipped(), &taking).unwrap_err();
            assert!(message.contains("asks gpupack for no GPU"), "{message}");
        }
    }
}

/// A pod without a GPU, of a scheduler only for gpupack.
fn beside(change: fn(&mut Value)) -> Value {
    pod(json!({}), |pod| {
        pod["spec"]["schedulerName"] = "gpupack".into();
        change(pod);
    })
}

#[test]
fn a_pod_without_a_gpu_for_our_scheduler_alone_is_held_to_the_same() {
    let done = admitted(&shipped(), &beside(|_| ())).unwrap();
    assert_eq!(env(&done["spec"]["containers"][1]), [VOID]);
    assert_eq!(done["spec"].get("runtimeClassName"), None);
    for bad in [
        (|p| p["spec"]["hostPID"] = true.into()) as fn(&mut Value),
        |p| p["spec"]["containers"][0]["securityContext"] = json!({"privileged": true}),
        |p| p["spec"]["volumes"] = json!([{"name": "v", "hostPath": {"path": "/dev"}}]),
    ] {
        assert!(admitted(&shipped(), &beside(bad)).is_err());
    }
    let allow = rules(|settings| settings.unmanaged = Unmanaged::Allow);
    assert_eq!(admitted(&allow, &beside(|_| ())), Ok(beside(|_| ())));
    // The cluster's own scheduler also places pods that have nothing to do with GPUs.
    let in_place = Admission::new(WebhookConfig::default(), vec!["default-scheduler".to_owned()]);
    let plain = pod(json!({}), |pod| pod["spec"]["hostPID"] = true.into());
    assert_eq!(admitted(&in_place, &plain), Ok(plain));
}

/// Changes of a container or of the pod's `spec` beyond *baseline*, and what the refusal says.
#[test]
fn what_goes_beyond_baseline_is_refused_in_every_kind_of_container() {
    let in_container = [
        (json!({"securityContext": {"capabilities": {"add": ["NET_RAW"]}}}), "`NET_RAW`"),
        (json!({"securityContext": {"capabilities": {"add": ["SYS_PTRACE"]}}}), "capabilities"),
        (json!({"securityContext": {"capabilities": {"add": ["chown"]}}}), "`chown`"),
        (json!({"securityContext": {"procMount": "Unmasked"}}), "`Unmasked`"),
        (json!({"securityContext": {"seccompProfile": {"type": "Unconfined"}}}), "seccomp"),
        (json!({"securityContext": {"appArmorProfile": {"type": "Unconfined"}}}), "appArmor"),
        (json!({"securityContext": {"seLinuxOptions": {"type": "spc_t"}}}), "`spc_t`"),
        (json!({"securityContext": {"seLinuxOptions": {"user": "root"}}}), "seLinuxOptions.user"),
        (json!({"securityContext": {"windowsOptions": {"hostProcess": true}}}), "hostProcess"),
        (json!({"ports": [{"containerPort": 80, "hostPort": 80}]}), "hostPort"),
        (json!({"livenessProbe": {"httpGet": {"port": 80, "host": "169.254.169.254"}}}), "`host`"),
        (json!({"lifecycle": {"preStop": {"tcpSocket": {"port": 1, "host": "db"}}}}), "`db`"),
        (json!({"env": [{"name": "NVIDIA_IMEX_CHANNELS", "value": "0"}]}), "NVIDIA_IMEX_CHANNELS"),
        (json!({"env": [{"name": "NVIDIA_GDS", "value": "enabled"}]}), "`NVIDIA_GDS`"),
        (json!({"envFrom": [{"prefix": "NVIDIA_VIS", "secretRef": {"name": "x"}}]}), "prefix"),
        (json!({"envFrom": [{"prefix": "NVIDIA_NEW_", "secretRef": {"name": "x"}}]}), "prefix"),
        (json!({"env": [{"name": "DOCKER_RESOURCE_GPU", "value": "all"}]}), "DOCKER_RESOURCE_GPU"),
        (json!({"envFrom": [{"prefix": "DOCKER_", "secretRef": {"name": "x"}}]}), "prefix"),
        (
            json!({"envFrom": [{"prefix": "DOCKER_RESOURCE_G", "secretRef": {"name": "x"}}]}),
            "prefix",
        ),
    ];
    for list in ["containers", "initContainers", "ephemeralContainers"] {
        for (change, part) in &in_container {
            let mut bad = half(|_| ());
            let mut container = json!({"name": "bad"});
            container.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
            let lists = bad["spec"].as_object_mut().unwrap();
            let containers = lists.entry(list).or_insert(json!([]));
            containers.as_array_mut().unwrap().push(container);
            let message = match list {
                "ephemeralContainers" => {
                    answered(&shipped(), &review(&bad, "ephemeralcontainers", Some(&half(|_| ()))))
                }
                _ => admitted(&shipped(), &bad),
            };
            let message = message.expect_err(part);
            assert!(message.contains(part) && message.contains("`bad`"), "{list}: {message}");
        }
    }
    for (change, part) in [
        (json!({"hostNetwork": true}), "allow_host_network"),
        (json!({"volumes": [{"name": "v", "hostPath": {"path": "/srv"}}]}), "allowed_host_paths"),
        (json!({"resourceClaims": [{"name": "gpu"}]}), "allow_resource_claims"),
        (json!({"terminationGracePeriodSeconds": 601}), "set `600` or less"),
        (json!({"terminationGracePeriodSeconds": i64::MAX}), "set `600` or less"),
        (json!({"securityContext": {"seccompProfile": {"type": "Unconfined"}}}), "seccompProfile"),
        (json!({"securityContext": {"appArmorProfile": {"type": "New"}}}), "`New`"),
        (json!({"securityContext": {"seLinuxOptions": {"role": "r"}}}), "seLinuxOptions.role"),
        (json!({"securityContext": {"windowsOptions": {"hostProcess": true}}}), "hostProcess"),
        (
            json!({"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}}),
            "allowed_sysctls",
        ),
    ] {
        let bad = half(|pod| {
            pod["spec"].as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        });
        let message = admitted(&shipped(), &bad).expect_err(part);
        assert!(message.contains(part), "{part}: {message}");
    }
    let key = "container.apparmor.security.beta.kubernetes.io/main";
    let unconfined = half(|pod| pod["metadata"]["annotations"][key] = "unconfined".into());
    assert!(admitted(&shipped(), &unconfined).unwrap_err().contains("apparmor"));
}

#[test]
fn what_baseline_allows_and_what_the_operator_lists_is_admitted() {
    let ordinary = half(|pod| {
        pod["spec"]["terminationGracePeriodSeconds"] = 600.into();
        pod["spec"]["securityContext"] = json!({"runAsUser": 1000, "fsGroup": 1000,
            "seccompProfile": {"type": "RuntimeDefault"}, "appArmorProfile": {"type": "Localhost"},
            "seLinuxOptions": {"type": "container_t", "level": "s0"},
            "sysctls": [{"name": "net.ipv4.tcp_syncookies", "value": "1"}]});
        pod["spec"]["volumes"] = json!([{"name": "a", "emptyDir": {}},
            {"name": "b", "persistentVolumeClaim": {"claimName": "b"}}]);
        pod["spec"]["containers"][0]["securityContext"] = json!({"procMount": "Default",
            "capabilities": {"add": ["CAP_CHOWN", "NET_BIND_SERVICE"], "drop": ["ALL"]}});
        pod["spec"]["containers"][0]["ports"] = json!([{"containerPort": 80, "hostPort": 0}]);
        pod["spec"]["containers"][0]["readinessProbe"] = json!({"httpGet": {"port": 80}});
        pod["spec"]["containers"][0]["env"] = json!([
            {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "all"},
            {"name": "NVIDIA_REQUIRE_CUDA", "value": "cuda>=12"},
            {"name": "NVIDIA_API_KEY", "value": "k"}]);
    });
    assert!(admitted(&shipped(), &ordinary).is_ok());
    let more = half(|pod| {
        pod["spec"]["hostNetwork"] = true.into();
        pod["spec"]["terminationGracePeriodSeconds"] = 3600.into();
        pod["spec"]["resourceClaims"] = json!([{"name": "nic"}]);
        pod["spec"]["securityContext"] =
            json!({"sysctls": [{"name": "net.core.somaxconn", "value": "1"}]});
        pod["spec"]["volumes"] = json!([{"name": "v", "hostPath": {"path": "/dev/infiniband"}}]);
        pod["spec"]["containers"][0]["ports"] = json!([{"containerPort": 80, "hostPort": 80}]);
        pod["spec"]["containers"][0]["securityContext"] =
            json!({"capabilities": {"add": ["IPC_LOCK"]}});
        pod["spec"]["containers"][0]["env"] = json!([{"name": "NVIDIA_GDS", "value": "enabled"}]);
    });
    let listed = rules(|settings| {
        settings.allow_host_network = true;
        settings.max_grace_period_seconds = 3600;
        settings.allow_resource_claims = true;
        settings.allowed_sysctls = vec!["net.core.somaxconn".to_owned()];
        settings.allowed_host_paths = vec!["/dev/infiniband".parse().unwrap()];
        settings.allowed_capabilities = vec!["IPC_LOCK".to_owned()];
        settings.allowed_variables = vec!["NVIDIA_GDS".to_owned()];
    });
    assert!(admitted(&listed, &more).is_ok());
    assert!(admitted(&shipped(), &more).is_err());
    let mut below = more.clone();
    below["spec"]["volumes"][0]["hostPath"]["path"] = "/dev/infiniband/link".into();
    assert!(
        admitted(&listed, &below).unwrap_err().contains("`subPath`"),
        "it may be a link to `/`"
    );
    // No list allows access to GPUs.
    let everything = rules(|settings| {
        settings.allowed_host_paths = vec!["/dev".parse().unwrap(), "/run".parse().unwrap()];
        settings.allowed_capabilities = vec!["SYS_ADMIN".to_owned()];
        settings.allowed_variables = vec!["NVIDIA_VISIBLE_DEVICES".to_owned()];
    });
    for bad in [
        (|p| p["spec"]["volumes"] = json!([{"name": "v", "hostPath": {"path": "/dev/nvidia0"}}]))
            as fn(&mut Value),
        |p| p["spec"]["volumes"] = json!([{"name": "v", "hostPath": {"path": "/run/gpupack"}}]),
        |p| {
            p["spec"]["containers"][0]["securityContext"] =
                json!({"capabilities": {"add": ["SYS_ADMIN"]}})
        },
        |p| {
            p["spec"]["containers"][0]["env"] =
                json!([{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}])
        },
    ] {
        assert!(admitted(&everything, &half(bad)).is_err());
    }
}

/// A pod of this scheduler that requests a GPU, and 4,096 of the resource.
fn requesting(scheduler: &str, annotations: Value, resource: &str) -> Value {
    pod(annotations, |pod| {
        pod["spec"]["schedulerName"] = scheduler.into();
        let limits = json!({"nvidia.com/gpu": "1", resource: "4096"});
        pod["spec"]["containers"][0]["resources"] = json!({"limits": limits});
    })
}

#[test]
fn keys_of_other_schedulers_are_refused_on_our_pods_and_left_on_others() {
    let hami = requesting("gpupack", json!({}), "nvidia.com/gpumem");
    let refusal = admitted(&shipped(), &hami).unwrap_err();
    for part in
        ["`main`", "`nvidia.com/gpumem`", "`gpu-memory` (MiB of one GPU)", "other_resources"]
    {
        assert!(refusal.contains(part), "`{part}` is not in `{refusal}`");
    }
    let network = requesting("gpupack", json!({}), "nvidia.com/hostdev");
    let requests = RequestRules {
        other_resources: vec!["nvidia.com/hostdev".to_owned()],
        ..RequestRules::default()
    };
    let listed = shipped().under(requests);
    let taken = admitted(&listed, &network).unwrap();
    let limits = &taken["spec"]["containers"][0]["resources"]["limits"];
    assert_eq!(
        (&limits["nvidia.com/hostdev"], &limits["nvidia.com/gpu"]),
        (&json!("4096"), &Value::Null)
    );
    // Another scheduler or kubelet's device plugin serves these.
    for scheduler in ["hami-scheduler", "default-scheduler"] {
        let annotations = json!({"nvidia.com/use-gpuuuid": "GPU-a"});
        let theirs = requesting(scheduler, annotations, "nvidia.com/gpumem");
        assert_eq!(admitted(&shipped(), &theirs), Ok(theirs.clone()), "{scheduler}");
    }
    let taking = rules(|settings| settings.take_over_whole_gpus = true);
    let theirs = requesting("default-scheduler", json!({}), "nvidia.com/gpumem");
    assert!(admitted(&taking, &theirs).is_err(), "its GPU would be a whole one");
    let limited = pod(json!({"gpu-fraction": "0.5", "nvidia.com/use-gputype": "A100"}), |_| ());
    assert!(admitted(&shipped(), &limited).unwrap_err().contains("`gpupack.dev/gpu-model`"));
    let small = pod(json!({"gpu-memory": "63"}), |_| ());
    assert!(admitted(&shipped(), &small).unwrap_err().contains("64 MiB"));
}
