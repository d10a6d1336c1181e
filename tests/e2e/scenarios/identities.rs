//! Every client proves who it is: kube-scheduler by a certificate, agents by the tokens of their pods.

use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use kube::Client;
use kube::api::{Api, DeleteParams, DynamicObject, PostParams};
use serde_json::json;

use crate::binaries;
use crate::browser;
use crate::clock;
use crate::cluster::Cluster;
use crate::control_plane::{ControlPlane, Identity};
use crate::extender::queried;
use crate::fleet::{A100, Fleet, T4};
use crate::identities::SERVICE;
use crate::manifests::{self, Mode};
use crate::pods::PodPlan;
use crate::testbed::{Setup, Stage, scenario};
use crate::watching::{Pods, bound, find, is_bound};

/// The page, as the API server passes it on.
const PAGE_PATH: &str = "/apis/inspection.gpupack.dev/v1/cluster/";

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
        // Agents have pods, too.
        let all = |pods: &Pods| plans.iter().all(|plan| is_bound(pods, &plan.name));
        stage.watching.until("all are bound", Duration::from_secs(30), all).await;
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
fn users_see_the_pods_that_they_may_list_in_commands_and_on_the_page() {
    scenario("people", |bed| async move {
        let fleet = Fleet::new().with("a100", 3, (4, A100)).with("t4", 2, (2, T4));
        let setup = Setup { has_identities: true, ..Setup::of(fleet) };
        let plane = bed.plane;
        let stage = bed.stage(setup).await;
        let admin = &stage.cluster.client;
        manifests::apply(admin, "rbac.yaml", Mode::Keep).await;
        api_service(&stage).await;
        in_commands(&stage, plane).await;
        on_the_page(&stage, plane).await;
        let services: Api<APIService> = Api::all(admin.clone());
        let removed = services.delete("v1.inspection.gpupack.dev", &DeleteParams::default()).await;
        removed.expect("it is there");
        stage.judge().await;
    });
}

async fn in_commands(stage: &Stage, plane: &ControlPlane) {
    stage.cluster.add_pods(&[PodPlan::fraction("secret-pod", "0.5").only_on("a100-00")]).await;
    let is_there = |pods: &Pods| is_bound(pods, "secret-pod");
    stage.watching.until("the pod is bound", Duration::from_secs(30), is_there).await;
    let namespace = &stage.cluster.namespace;
    for object in rights(namespace) {
        manifests::keep(&stage.cluster.client, "rights", &object).await;
    }
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
    assert!(code == Some(0) && text.contains("(another team)  a100"), "{text}");
    assert!(!text.contains("secret"), "{text}");
    let (code, text) = ask(&["top", "gpus"], "outsider").await;
    assert!(code == Some(0) && text.contains("50%"), "how full a GPU is: {text}");
    let pod = format!("{namespace}/secret-pod");
    assert_eq!(ask(&["explain", &pod], "insider").await.0, Some(0));
    assert_eq!(ask(&["explain", &pod], "outsider").await.0, Some(5));
    let (code, text) = ask(&["top", "gpus"], "stranger").await;
    assert!(code == Some(1) && text.contains("gpupack-view"), "{text}");
    stage.cluster.delete_pod("secret-pod").await;
    let is_gone = |pods: &Pods| find(pods, "secret-pod").is_none_or(|seen| seen.gone.is_some());
    stage.watching.until("the pod is gone", Duration::from_secs(30), is_gone).await;
    stage.until_ledgers_agree().await;
}

/// Teams whose pods a tenant of the team `vision` may not see, and words in the names of these pods.
const HIDDEN: [&str; 5] = ["speech", "asr-", "research", "tune-", "night-"];

/// An operator sees all pods, and a tenant blocks of another team.
async fn on_the_page(stage: &Stage, plane: &ControlPlane) {
    let admin = &stage.cluster.client;
    // Agents have pods, too.
    let before = stage.watching.ask(bound);
    let placed = teams(stage).await;
    stage.watching.until_bound(before + placed, Duration::from_secs(60)).await;
    let accounts = &stage.cluster.namespace;
    for object in rights_of_browsers(accounts) {
        manifests::keep(admin, "rights", &object).await;
    }
    let [operator, tenant] =
        [token(admin, accounts, "operator").await, token(admin, accounts, "tenant").await];
    let page = format!("https://{}{PAGE_PATH}", plane.address());
    until_shown(&page, &operator, plane).await;
    let variables = [
        ("PAGE", page),
        ("OPERATOR", operator),
        ("TENANT", tenant),
        ("OWN", "vision".to_owned()),
        ("HIDDEN", HIDDEN.join(",")),
    ];
    let played = tokio::task::spawn_blocking(move || {
        let variables = variables.each_ref().map(|(name, value)| (*name, value.as_str()));
        browser::run("people.mjs", &variables)
    });
    if let Err(why) = played.await.expect("the page is as it should be") {
        let is_required = clock::variable("GPUPACK_PAGE_REQUIRED").is_some();
        assert!(!is_required, "the page is not tested: {why}");
        binaries::say(&format!("skipped: people in a browser because {why}"));
    }
}

/// Pods of three teams, and two that wait. How many will be bound.
async fn teams(stage: &Stage) -> usize {
    let admin = &stage.cluster.client;
    let mut placed = 0;
    for (team, name, fractions) in [
        ("vision", "detector", &["0.5", "0.25", "0.25", "0.5", "1"][..]),
        ("speech", "asr", &["0.25", "0.5", "0.25", "0.5", "0.75"]),
        ("research", "tune", &["1", "0.5", "0.25", "0.125", "1"]),
    ] {
        let namespace =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": team}});
        let namespace = serde_json::from_value(namespace).expect("an object");
        manifests::keep(admin, "namespace", &namespace).await;
        let cluster = Cluster { client: admin.clone(), namespace: team.to_owned() };
        let plan =
            |(at, fraction): (usize, &&str)| PodPlan::fraction(format!("{name}-{at}"), fraction);
        let plans: Vec<PodPlan> = fractions.iter().enumerate().map(plan).collect();
        cluster.add_pods(&plans).await;
        placed += plans.len();
        let waits = match team {
            "research" => continue,
            "speech" => "night-run",
            _ => "labeler",
        };
        let waits = PodPlan::fraction(waits, "0.5").annotated("gpupack.dev/gpu-model", "H100");
        cluster.add_pods(&[waits]).await;
    }
    placed
}

/// `operator` and `tenant` may query; the one may list all pods, the other those of its team.
fn rights_of_browsers(namespace: &str) -> Vec<DynamicObject> {
    let group = "rbac.authorization.k8s.io";
    let version = format!("{group}/v1");
    let account =
        |name: &str| json!({"kind": "ServiceAccount", "name": name, "namespace": namespace});
    let role = |kind: &str, name: &str| json!({"kind": kind, "name": name, "apiGroup": group});
    let lists = json!([{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]);
    let objects = [
        json!({"apiVersion": "v1", "kind": "ServiceAccount",
            "metadata": {"name": "operator", "namespace": namespace}}),
        json!({"apiVersion": "v1", "kind": "ServiceAccount",
            "metadata": {"name": "tenant", "namespace": namespace}}),
        json!({"apiVersion": version, "kind": "ClusterRoleBinding",
            "metadata": {"name": "browsers"}, "roleRef": role("ClusterRole", "gpupack-view"),
            "subjects": [account("operator"), account("tenant")]}),
        json!({"apiVersion": version, "kind": "ClusterRole", "metadata": {"name": "lists-all-pods"},
            "rules": lists}),
        json!({"apiVersion": version, "kind": "ClusterRoleBinding",
            "metadata": {"name": "lists-all-pods"},
            "roleRef": role("ClusterRole", "lists-all-pods"), "subjects": [account("operator")]}),
        json!({"apiVersion": version, "kind": "Role",
            "metadata": {"name": "lists-pods", "namespace": "vision"}, "rules": lists}),
        json!({"apiVersion": version, "kind": "RoleBinding",
            "metadata": {"name": "lists-pods", "namespace": "vision"},
            "roleRef": role("Role", "lists-pods"), "subjects": [account("tenant")]}),
    ];
    objects.map(|object| serde_json::from_value(object).expect("an object")).into()
}

/// A token of an account, for the API server.
async fn token(admin: &Client, namespace: &str, account: &str) -> String {
    let accounts: Api<ServiceAccount> = Api::namespaced(admin.clone(), namespace);
    let request = TokenRequest::default();
    let answer = accounts.create_token_request(account, &PostParams::default(), &request).await;
    answer.expect("a token").status.expect("the answer has it").token.expect("the answer has it")
}

/// Waits until the API server passes queries of this account on.
async fn until_shown(page: &str, token: &str, plane: &ControlPlane) {
    let started = clock::now();
    let file = plane.work().join("operator.kubeconfig");
    let server = format!("https://{}", plane.address());
    let config = json!({"apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": server,
            "certificate-authority": plane.certificate()}}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}]});
    std::fs::write(&file, config.to_string()).expect("the work folder is writable");
    let file = file.to_str().expect("the target folder is UTF-8");
    loop {
        let (code, text) = queried(&["top", "gpus", "--kubeconfig", file]).await;
        if code == Some(0) {
            return;
        }
        let limit = Duration::from_secs(60);
        assert!(started.elapsed() < limit, "{page} is not there: {text}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
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
pub(super) async fn api_service(stage: &Stage) {
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
