//! The extender has the rights that it needs, and none more: the API server notes each of its calls, and
//! each right is taken from it once.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use kube::Client;
use kube::api::{Api, DeleteParams, DynamicObject};
use serde_json::{Value, json};

use crate::clock;
use crate::control_plane::{ControlPlane, Identity};
use crate::extender::Extender;
use crate::fleet::{A100, Fleet};
use crate::kept;
use crate::manifests::{self, Mode};
use crate::pods::PodPlan;
use crate::replicas::make_pod;
use crate::testbed::{Setup, Stage, scenario};

/// How long it may take until a call is made.
const LIMIT: Duration = Duration::from_secs(30);

/// Roles in `deploy/rbac.yaml`, by kind and name.
type Roles = [(&'static str, &'static str)];

/// Those of the extender.
const ROLES: &Roles = &[("ClusterRole", "gpupack"), ("Role", "gpupack-lease")];

/// Those for certificates: two of one name are in two namespaces.
const FOR_CERTIFICATES: &Roles =
    &[("ClusterRole", "gpupack-certificates"), ("Role", "gpupack-certificates")];

/// One thing that a role allows.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Right {
    verb: String,
    group: String,
    /// With its subresource.
    resource: String,
}

impl fmt::Display for Right {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { verb, group, resource } = self;
        let dot = if group.is_empty() { "" } else { "." };
        write!(f, "{verb} {resource}{dot}{group}")
    }
}

#[test]
fn each_right_of_the_extender_is_needed() {
    scenario("needed-rights", |bed| async move {
        let plane = bed.plane;
        let fleet = Fleet::new().with("needed-rights", 1, (2, A100));
        let setup = Setup { has_identities: true, ..Setup::of(fleet) };
        let mut stage = bed.stage(setup).await;
        let admin = stage.cluster.client.clone();
        make_pod(&admin, "gpupack-0").await;
        let leases: Api<Lease> = Api::namespaced(admin.clone(), "gpu-system");
        let _absent = leases.delete("gpupack", &DeleteParams::default()).await;
        stage.extender.kill();
        stage.extender.become_replica("gpupack-0");
        stage.extender.start_again().await;

        // Each is used. A repeated event is patched after a minute: the recorder of `kube` does that.
        let patched = Right {
            verb: "patch".to_owned(),
            group: "events.k8s.io".to_owned(),
            resource: "events".to_owned(),
        };
        let mut expected = granted(ROLES);
        assert!(expected.remove(&patched), "{expected:?}");
        assert!(expected.len() > 10, "{expected:?}");
        let started = clock::now();
        let mut round = 0;
        let used = loop {
            provoke(&stage, &mut round).await;
            tokio::time::sleep(Duration::from_millis(500)).await;
            let used = noted(plane, 0, |code| code != 403);
            if expected.is_subset(&used) {
                break used;
            }
            let unused: Vec<String> = expected.difference(&used).map(ToString::to_string).collect();
            assert!(started.elapsed() < LIMIT, "not used: {unused:?}");
        };
        stage.figure(&format!("{} of {} rights are used", expected.len(), expected.len() + 1));
        let others: Vec<String> =
            used.difference(&granted(ROLES)).map(ToString::to_string).collect();
        stage.figure(&format!("by other roles: {others:?}"));

        // Without it, a call is refused.
        for right in &expected {
            set_roles(&admin, ROLES, Some(right)).await;
            stage.extender.kill();
            let _absent = leases.delete("gpupack", &DeleteParams::default()).await;
            if right.verb == "update" || right.verb == "get" {
                take_lease(&leases).await;
            }
            let before = lines(plane);
            let started = clock::now();
            stage.extender.start_at_once();
            while !is_missed(plane, before, right, Duration::from_millis(500)).await {
                assert!(started.elapsed() < LIMIT, "nothing misses `{right}`");
                provoke(&stage, &mut round).await;
            }
            stage.figure(&format!(
                "without `{right}`: refused after {} ms",
                clock::ms(started.elapsed())
            ));
        }
        set_roles(&admin, ROLES, None).await;
        stage.extender.kill();
        stage.extender.start_again().await;
    });
}

#[test]
fn each_right_for_certificates_is_needed() {
    scenario("certificate-rights", |bed| async move {
        let (plane, admin) = (bed.plane, &bed.cluster.client);
        let section = json!({"make": true, "certificate_seconds": 20});
        let settings = kept::settings(plane, "certificate-rights", &section);
        manifests::apply(admin, "rbac.yaml", Mode::Keep).await;
        kept::empty_objects(admin).await;
        let before = lines(plane);
        let kubeconfig = plane.kubeconfig(Identity::Extender);
        let mut extender = Extender::start(plane, &kubeconfig, settings).await;
        let expected = granted(FOR_CERTIFICATES);
        assert_eq!(expected.len(), 8, "{expected:?}");
        let started = clock::now();
        loop {
            let used = noted(plane, before, |code| code != 403);
            let unused: Vec<String> = expected.difference(&used).map(ToString::to_string).collect();
            if unused.is_empty() {
                break;
            }
            assert!(started.elapsed() < LIMIT, "not used: {unused:?}");
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        for right in &expected {
            set_roles(admin, FOR_CERTIFICATES, Some(right)).await;
            extender.kill();
            let before = lines(plane);
            let started = clock::now();
            extender.start_at_once();
            while !is_missed(plane, before, right, Duration::from_millis(1_500)).await {
                assert!(started.elapsed() < LIMIT, "nothing misses `{right}`");
                // Everything is due again.
                kept::empty_objects(admin).await;
            }
            let took = clock::ms(started.elapsed());
            crate::testbed::figure(
                bed.name,
                &format!("without `{right}`: refused after {took} ms"),
            );
        }
        set_roles(admin, FOR_CERTIFICATES, None).await;
        extender.kill();
        kept::remove_objects(admin).await;
    });
}

/// A pod that waits, and a query. Agents report by themselves.
async fn provoke(stage: &Stage, round: &mut usize) {
    *round += 1;
    let fits = PodPlan::fraction(format!("fits-{round}"), "0.01");
    let waits = PodPlan::memory(format!("waits-{round}"), 900_000);
    stage.cluster.add_pods(&[fits, waits]).await;
    stage.extender.try_query().await;
}

/// A Lease of another replica that has expired.
async fn take_lease(leases: &Api<Lease>) {
    let lease = json!({"metadata": {"name": "gpupack"}, "spec": {"holderIdentity": "gpupack-9_1",
        "leaseDurationSeconds": 3, "renewTime": "2026-01-01T00:00:00.000000Z",
        "acquireTime": "2026-01-01T00:00:00.000000Z", "leaseTransitions": 1}});
    let lease = serde_json::from_value(lease).expect("a lease");
    leases.create(&Default::default(), &lease).await.expect("it can be created");
}

/// What the shipped roles allow.
fn granted(roles: &Roles) -> BTreeSet<Right> {
    shipped(roles)
        .iter()
        .flat_map(|role| rights(&role.data["rules"]))
        .map(|(right, _)| right)
        .collect()
}

fn shipped(roles: &Roles) -> Vec<DynamicObject> {
    let is_ours = |object: &DynamicObject| {
        let kind = object.types.as_ref().map(|types| types.kind.as_str());
        let name = object.metadata.name.as_deref();
        roles.iter().any(|(of, role)| kind == Some(of) && name == Some(role))
    };
    let found: Vec<_> = manifests::objects("rbac.yaml").into_iter().filter(is_ours).collect();
    assert!(found.len() >= roles.len(), "{roles:?}");
    found
}

/// Each right of some rules, and the names that it is limited to.
fn rights(rules: &Value) -> Vec<(Right, Value)> {
    let texts = |value: &Value| -> Vec<String> {
        serde_json::from_value(value.clone()).expect("a list of texts")
    };
    let mut all = Vec::new();
    for rule in rules.as_array().expect("a list") {
        for group in texts(&rule["apiGroups"]) {
            for resource in texts(&rule["resources"]) {
                for verb in texts(&rule["verbs"]) {
                    let (group, resource) = (group.clone(), resource.clone());
                    all.push((Right { verb, group, resource }, rule["resourceNames"].clone()));
                }
            }
        }
    }
    all
}

/// Writes the shipped roles, without this right.
async fn set_roles(admin: &Client, roles: &Roles, without: Option<&Right>) {
    for mut role in shipped(roles) {
        let kept = rights(&role.data["rules"]).into_iter().filter(|(it, _)| Some(it) != without);
        let rules = kept.map(|(right, names)| {
            let mut rule = json!({"apiGroups": [right.group], "resources": [right.resource],
                "verbs": [right.verb]});
            if !names.is_null() {
                rule["resourceNames"] = names;
            }
            rule
        });
        role.data["rules"] = rules.collect();
        manifests::keep(admin, "rbac.yaml", &role).await;
    }
    if without.is_none() {
        manifests::apply(admin, "rbac.yaml", Mode::Keep).await;
    }
}

fn lines(plane: &ControlPlane) -> usize {
    std::fs::read_to_string(plane.audit_log()).unwrap_or_default().lines().count()
}

/// Whether a call is refused within this time, after this many lines of the log, because it needs the right.
async fn is_missed(plane: &ControlPlane, after: usize, right: &Right, within: Duration) -> bool {
    let started = clock::now();
    loop {
        if noted(plane, after, |code| code == 403).contains(right) {
            return true;
        }
        if started.elapsed() > within {
            return false;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// The rights that calls needed which were answered so, after this many lines of the log.
fn noted(plane: &ControlPlane, after: usize, is_wanted: impl Fn(u64) -> bool) -> BTreeSet<Right> {
    let text = std::fs::read_to_string(plane.audit_log()).expect("the API server writes it");
    let calls = text.lines().skip(after).filter_map(|line| serde_json::from_str(line).ok());
    let wanted = calls
        .filter(|call: &Value| call["responseStatus"]["code"].as_u64().is_some_and(&is_wanted));
    wanted.filter_map(|call| right_of(&call)).collect()
}

fn right_of(call: &Value) -> Option<Right> {
    let object = call.get("objectRef")?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut resource = text(&object["resource"]);
    if let Some(below) = object["subresource"].as_str() {
        resource = format!("{resource}/{below}");
    }
    Some(Right { verb: text(&call["verb"]), group: text(&object["apiGroup"]), resource })
}
