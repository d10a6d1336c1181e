//! Classes of workloads, chosen by a label, and what pods of a namespace may use.

use std::time::Duration;

use serde_json::json;

use crate::clock;
use crate::fleet::{A100, Fleet};
use crate::manifests::{self, Mode};
use crate::pods::PodPlan;
use crate::testbed::{Setup, scenario};
use crate::watching::{Pods, evicted, is_bound};
use crate::webhook::{Webhook, dry_run};

const LIMIT: Duration = Duration::from_secs(30);

/// Many times as long as an eviction or a requeue takes.
const LONG_ENOUGH: Duration = Duration::from_secs(8);

/// The namespace whose pods may use little.
const APART: &str = "apart";

#[test]
fn a_label_chooses_the_class_and_the_class_protects_its_pods() {
    scenario("workloads", |bed| async move {
        let plane = bed.plane;
        let settings = json!({
            "standing_hold_after_seconds": 0,
            "workloads": {
                "train": {},
                "notebook": {"protect_seconds": 3_600},
                "serve": {"preemptible": false, "policy": "spread"},
            },
        });
        let fleet = Fleet::new().with("workloads", 3, (1, A100));
        let setup = Setup { settings: settings.clone(), ..Setup::of(fleet) };
        let stage = bed.stage(setup).await;
        manifests::apply(&stage.cluster.client, "evict.yaml", Mode::Keep).await;
        let _webhook = Webhook::start(plane, &stage.cluster, settings).await;
        for (name, value) in [
            ("gpupack-train", 100),
            ("gpupack-notebook", 200),
            ("gpupack-serve", 300),
            ("e2e-top", 900),
        ] {
            stage.cluster.add_priority_class(name, value).await;
        }
        // Admission completes the pod with the value of the class that the label chooses, although it had
        // completed it before with that of another one.
        let named = whole("named").labelled(LABEL, "train").important("e2e-top").to_pod();
        let stored = dry_run(&stage.cluster.pods(), &named).await.expect("a good pod");
        let spec = stored.spec.expect("a pod has one");
        assert_eq!(spec.priority_class_name.as_deref(), Some("gpupack-train"));
        assert_eq!(
            (spec.priority, spec.preemption_policy.as_deref()),
            (Some(100), Some("PreemptLowerPriority"))
        );
        let typo = whole("typo").labelled(LABEL, "trian").to_pod();
        let refusal = dry_run(&stage.cluster.pods(), &typo).await.expect_err("no such class");
        assert!(refusal.contains("use `notebook`, `serve` or `train`"), "{refusal}");

        let of = |name: &str, class: &str| whole(name).labelled(LABEL, class);
        stage
            .cluster
            .add_pods(&[of("train", "train"), of("notebook", "notebook"), of("serve", "serve")])
            .await;
        stage.watching.until_bound(3, LIMIT).await;
        let started = clock::now();
        stage.cluster.add_pods(&[of("second", "serve")]).await;
        stage
            .watching
            .until("in the place of `train`", LIMIT, |pods| is_bound(pods, "second"))
            .await;
        let took = started.elapsed();
        assert_eq!(stage.watching.ask(evicted), ["train"], "the only one that may go");
        // More important than all of them, and all are protected: by time, and always.
        stage.cluster.add_pods(&[whole("top").important("e2e-top"), of("again", "train")]).await;
        tokio::time::sleep(LONG_ENOUGH).await;
        assert_eq!(stage.watching.ask(evicted), ["train"]);
        stage.figure(&format!(
            "one pod of each class on three GPUs: for a second one of `serve` that of `train` goes, and it is \
             bound after {} ms; none goes for a more important pod after that",
            clock::ms(took)
        ));
        stage.judge().await;
    });
}

#[test]
fn a_namespace_may_use_what_the_operator_allows_and_nothing_else() {
    scenario("access", |bed| async move {
        let plane = bed.plane;
        let settings = json!({
            // Each node is a pool of its own.
            "pool_label": "kubernetes.io/hostname",
            "workloads": {"train": {}},
            "access": {"namespaces": {APART: {
                "pools": ["access-01"], "isolation": ["none"], "policies": ["binpack"], "workloads": [],
            }}},
        });
        let fleet = Fleet::new().with("access", 2, (1, A100));
        let setup = Setup { settings: settings.clone(), ..Setup::of(fleet) };
        let stage = bed.stage(setup).await;
        let _webhook = Webhook::start(plane, &stage.cluster, settings).await;
        stage.cluster.add_priority_class("gpupack-train", 100).await;
        let apart = stage.cluster.beside(APART, json!({})).await;
        for (plan, part) in [
            (half("a").annotated("gpupack.dev/isolation", "hardware"), "isolation `hardware`"),
            (half("a").annotated("gpupack.dev/policy", "spread"), "policy `spread`"),
            (half("a").labelled(LABEL, "train"), "workload class `train`"),
            (half("a").important("gpupack-train"), "workload class `train`"),
        ] {
            let refusal = dry_run(&apart.pods(), &plan.to_pod()).await.expect_err(part);
            let is_told =
                refusal.contains("namespace `apart` may not use") && refusal.contains(part);
            assert!(is_told, "{part}: {refusal}");
            dry_run(&stage.cluster.pods(), &plan.to_pod()).await.expect("others may");
        }
        let many: Vec<PodPlan> = (0..4).map(|at| half(&format!("a-{at}"))).collect();
        apart.add_pods(&many).await;
        stage.watching.until_bound(2, LIMIT).await;
        tokio::time::sleep(LONG_ENOUGH).await;
        let nodes = |pods: &Pods| {
            let nodes = pods.values().filter_map(|seen| seen.pod.spec.as_ref()?.node_name.clone());
            nodes.collect::<Vec<_>>()
        };
        assert_eq!(stage.watching.ask(nodes), ["access-01", "access-01"], "and no other node");
        let waits = stage.watching.ask(|pods| {
            let waits = pods.iter().find(|(_, seen)| seen.bound.is_none());
            waits.and_then(|(_, seen)| seen.pod.metadata.name.clone()).expect("two wait")
        });
        let why = stage.extender.page(&format!("/v1/explain?pod={APART}/{waits}")).await;
        assert!(why.contains("pool not allowed for the namespace"), "{why}");
        let open = half("open").annotated("gpupack.dev/policy", "spread");
        stage.cluster.add_pods(&[open]).await;
        stage.watching.until_bound(3, LIMIT).await;
        stage.figure(
            "four halves of a namespace that may use one of two GPUs: two are bound there, two wait; isolation, \
             policy and class that it may not use are refused at creation",
        );
        stage.judge().await;
    });
}

const LABEL: &str = "gpupack.dev/workload";

fn whole(name: &str) -> PodPlan {
    PodPlan::fraction(name, "1")
}

fn half(name: &str) -> PodPlan {
    PodPlan::fraction(name, "0.5")
}
