//! Every client proves who it is: kube-scheduler by a certificate, agents by the tokens of their pods.

use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use kube::api::{Api, DeleteParams, DynamicObject};
use serde_json::json;

use crate::clock;
use crate::control_plane::Identity;
use crate::extender::queried;
use crate::fleet::{A100, Fleet};
use crate::identities::SERVICE;
use crate::manifests::{self, Mode};
use crate::pods::PodPlan;
use crate::testbed::{Setup, Stage, scenario};

#[test]
fn pods_are_bound_with_certificates_and_tokens_of_the_api_server() {
    scenario("identities", |bed| async move {
        let fleet = Fleet::new().with("identities", 2, (2, A100));
        let setup = Setup { has_identities: true, ..Setup::of(fleet) };
        let stage = bed.stage(setup).await;
        let plans: Vec<PodPlan> =
            (0..6).map(|at| PodPlan::fraction(format!("share-{at}"), "0.5")).collect();
        let started = clock::now();
        stage.cluster.add_pods(&plans).await;
        stage.watching.until_bound(plans.len(), Duration::from_secs(30)).await;
        stage.figure(&format!(
            "6 pods bound in {} ms, over mutual TLS",
            clock::ms(started.elapsed())
        ));
        let refused = stage.extender.metric("gpupack_reports_total", "unproven").await;
        assert!(refused == 0.0, "{refused} reports were refused");
        stage.until_ledgers_agree().await;
        let [first, second] = [0, 1].map(|at| stage.fleet.nodes[at].name.clone());
        for (account, runs_on) in [("intruder", &first), ("gpupack-agent", &second)] {
            let refused = stage.extender.metric("gpupack_reports_total", "unproven").await;
            let _other = stage.start_other_agent(&first, account, runs_on).await;
            until_more(&stage, "unproven", refused).await;
        }
        // Only the newer one of two agents is believed.
        let _newer = stage.start_other_agent(&first, "gpupack-agent", &first).await;
        until_more(&stage, "second_agent", 0.0).await;
        let accepted = stage.extender.metric("gpupack_reports_total", "accepted").await;
        until_more(&stage, "accepted", accepted + 2.0).await;
        stage.until_ledgers_agree().await;
        stage.judge().await;
    });
}

#[test]
fn users_see_the_pods_that_they_may_list_through_the_api_server() {
    scenario("people", |bed| async move {
        let fleet = Fleet::new().with("people", 1, (2, A100));
        let setup = Setup { has_identities: true, ..Setup::of(fleet) };
        let plane = bed.plane;
        let stage = bed.stage(setup).await;
        stage.cluster.add_pods(&[PodPlan::fraction("secret-pod", "0.5")]).await;
        stage.watching.until_bound(1, Duration::from_secs(30)).await;
        let admin = &stage.cluster.client;
        manifests::apply(admin, "rbac.yaml", Mode::Keep).await;
        let namespace = &stage.cluster.namespace;
        for object in rights(namespace) {
            manifests::keep(admin, "rights", &object).await;
        }
        api_service(&stage).await;
        let kubeconfig = plane.kubeconfig(Identity::Admin);
        let kubeconfig = kubeconfig.to_str().expect("the target folder is UTF-8");
        let ask = async |what: &[&str], user: &str| {
            queried(&[what, &["--kubeconfig", kubeconfig, "--as", user]].concat()).await
        };
        let started = clock::now();
        let seen = loop {
            let (code, text) = ask(&["top", "tenants", "-A"], "insider").await;
            if code == Some(0) {
                break text;
            }
            let limit = Duration::from_secs(60);
            assert!(started.elapsed() < limit, "the API server calls nobody: {text}");
            tokio::time::sleep(Duration::from_millis(200)).await;
        };
        stage.figure(&format!("an APIService answers after {} ms", clock::ms(started.elapsed())));
        assert!(seen.contains("secret-pod"), "{seen}");
        let (code, text) = ask(&["top", "tenants", "-A"], "outsider").await;
        assert!(code == Some(0) && text.contains("(another team)  people"), "{text}");
        assert!(!text.contains("secret"), "{text}");
        let (code, text) = ask(&["top", "gpus"], "outsider").await;
        assert!(code == Some(0) && text.contains("50%"), "how full a GPU is: {text}");
        let pod = format!("{namespace}/secret-pod");
        assert_eq!(ask(&["explain", &pod], "insider").await.0, Some(0));
        assert_eq!(ask(&["explain", &pod], "outsider").await.0, Some(5));
        let (code, text) = ask(&["top", "gpus"], "stranger").await;
        assert!(code == Some(1) && text.contains("gpupack-view"), "{text}");
        let services: Api<APIService> = Api::all(admin.clone());
        let removed = services.delete("v1.inspection.gpupack.dev", &DeleteParams::default()).await;
        removed.expect("it is there");
        stage.judge().await;
    });
}

/// `insider` and `outsider` may query, and `insider` may list the pods of this namespace.
fn rights(namespace: &str) -> Vec<DynamicObject> {
    let group = "rbac.authorization.k8s.io";
    let user = |name: &str| json!({"kind": "User", "name": name, "apiGroup": group});
    let role = |kind: &str, name: &str| json!({"kind": kind, "name": name, "apiGroup": group});
    let version = format!("{group}/v1");
    let objects = [
        json!({"apiVersion": version, "kind": "ClusterRoleBinding",
            "metadata": {"name": "people"}, "roleRef": role("ClusterRole", "gpupack-view"),
            "subjects": [user("insider"), user("outsider")]}),
        json!({"apiVersion": version, "kind": "Role",
            "metadata": {"name": "lists-pods", "namespace": namespace},
            "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]}),
        json!({"apiVersion": version, "kind": "RoleBinding",
            "metadata": {"name": "lists-pods", "namespace": namespace},
            "roleRef": role("Role", "lists-pods"), "subjects": [user("insider")]}),
    ];
    objects.map(|object| serde_json::from_value(object).expect("an object")).into()
}

/// The shipped APIService. Nothing here forwards what is sent to the address of a Service, so it is that
/// of another name: this machine's.
async fn api_service(stage: &Stage) {
    let admin = &stage.cluster.client;
    let service = json!({"apiVersion": "v1", "kind": "Service",
        "metadata": {"name": SERVICE, "namespace": "gpu-system"},
        "spec": {"type": "ExternalName", "externalName": "localhost"}});
    let service = serde_json::from_value(service).expect("an object");
    manifests::keep(admin, "service", &service).await;
    let ca = stage.certificate_of_ca();
    let mut shipped = manifests::objects("api-service.yaml").remove(0);
    let spec = &mut shipped.data["spec"];
    spec["caBundle"] = json!(ByteString(std::fs::read(ca).expect("we wrote that file")));
    spec["service"]["name"] = SERVICE.into();
    spec["service"]["port"] = stage.extender.page_address().port().into();
    manifests::keep(admin, "api-service.yaml", &shipped).await;
}

/// Waits until more reports than `before` ended so.
async fn until_more(stage: &Stage, result: &str, before: f64) {
    let started = clock::now();
    while stage.extender.metric("gpupack_reports_total", result).await <= before {
        let limit = Duration::from_secs(30);
        assert!(started.elapsed() < limit, "no more {result} reports after {limit:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
