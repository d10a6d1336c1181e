//! The recipes (`deploy/recipes`): each file applied as it is, and its pods, as controllers would make
//! them, admitted under *baseline* by webhook and policies and placed by kube-scheduler. No image is pulled;
//! the programs inside run in `tests/integration/recipes.rs`.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, PersistentVolume, Pod};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, DynamicObject, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt};
use serde_json::{Value, json};

use crate::binaries;
use crate::clock;
use crate::fleet::{A100, Fleet};
use crate::manifests::{Mode, objects, send};
use crate::testbed::{Setup, Stage, scenario};
use crate::watching::find;
use crate::webhook::{Webhook, policies, reported};

const LIMIT: Duration = Duration::from_secs(60);

/// The module of KEDA that has the definition of ScaledObject, and its file there.
const KEDA: (&str, &str) =
    ("github.com/kedacore/keda/v2@v2.21.0", "config/crd/bases/keda.sh_scaledobjects.yaml");

/// What the pods of a recipe get.
struct Expected {
    file: &'static str,
    /// How many pods its controller would make.
    pods: usize,
    /// Devices of each.
    devices: usize,
    /// Memory on each device: half of an A100 is 40660 MiB.
    mib: &'static str,
}

const RECIPES: [Expected; 8] = [
    Expected { file: "notebook.yaml", pods: 1, devices: 1, mib: "8192" },
    Expected { file: "borrowing-notebook.yaml", pods: 1, devices: 1, mib: "40660" },
    Expected { file: "vllm.yaml", pods: 1, devices: 1, mib: "40660" },
    Expected { file: "pytorch.yaml", pods: 1, devices: 1, mib: "20330" },
    Expected { file: "tensorflow.yaml", pods: 1, devices: 1, mib: "10240" },
    Expected { file: "training.yaml", pods: 1, devices: 4, mib: "81320" },
    // As many as its autoscaler may make.
    Expected { file: "autoscaling.yaml", pods: 8, devices: 1, mib: "20330" },
    Expected { file: "scale-to-zero.yaml", pods: 4, devices: 1, mib: "12288" },
];

#[test]
fn every_recipe_is_accepted_admitted_and_placed() {
    scenario("recipes", |bed| async move {
        let plane = bed.plane;
        let stage = bed.stage(Setup::of(Fleet::new().with("recipes", 2, (8, A100)))).await;
        let _webhook = Webhook::start(plane, &stage.cluster, json!({})).await;
        policies(&stage.cluster).await;
        enforce_baseline(&stage).await;
        let knows_keda = define_scaled_objects(&stage).await;
        let mut made = Vec::new();
        for recipe in &RECIPES {
            for (name, kind) in applied(&stage, recipe.file, knows_keda).await {
                if kind == "PersistentVolumeClaim" {
                    bind_claim(&stage, &name).await;
                }
            }
            for pod in pods_of(recipe) {
                let created = stage.cluster.pods().create(&PostParams::default(), &pod).await;
                let created = created.map_err(|error| reported(&error));
                let created = created.unwrap_or_else(|error| panic!("{}: {error}", recipe.file));
                sees_its_share(&created, recipe.file);
                made.push((created.name_any(), recipe));
            }
        }
        stage.watching.until_bound(made.len(), LIMIT).await;
        for (name, recipe) in &made {
            let placed = stage.watching.ask(|pods| find(pods, name).map(|it| it.devices().len()));
            assert_eq!(placed, Some(recipe.devices), "{}", recipe.file);
            let pod = stage.watching.ask(|pods| find(pods, name).map(|it| it.pod.clone()));
            let memory =
                pod.and_then(|pod| pod.annotations().get("placed.gpupack.dev/memory-mib").cloned());
            assert_eq!(memory.as_deref(), Some(recipe.mib), "{}", recipe.file);
        }
        stage.figure(&format!("{} pods of {} recipes placed", made.len(), RECIPES.len()));
        stage.judge().await;
    });
}

/// What namespaces of users should enforce, by docs/admission.md.
async fn enforce_baseline(stage: &Stage) {
    let label = json!({"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "baseline"}}});
    let api: Api<Namespace> = Api::all(stage.cluster.client.clone());
    let patched =
        api.patch(&stage.cluster.namespace, &PatchParams::default(), &Patch::Merge(label)).await;
    patched.expect("namespaces can be labeled");
}

/// Lets the API server know ScaledObjects, if KEDA's module can be had.
async fn define_scaled_objects(stage: &Stage) -> bool {
    let (module, file) = KEDA;
    let text = binaries::module(module).and_then(|folder| {
        std::fs::read_to_string(folder.join(file)).map_err(|error| format!("{file}: {error}"))
    });
    let text = match text {
        Ok(text) => text,
        Err(reason) => {
            binaries::say(&format!("skipped: the ScaledObject of the recipes because {reason}"));
            return false;
        }
    };
    let definition: CustomResourceDefinition =
        serde_yaml_ng::from_str(&text).expect("KEDA ships a definition");
    let name = definition.name_any();
    let api: Api<CustomResourceDefinition> = Api::all(stage.cluster.client.clone());
    let parameters = PatchParams::apply("testbed").force();
    let applied = api.patch(&name, &parameters, &Patch::Apply(definition)).await;
    applied.unwrap_or_else(|error| panic!("{name}: {error}"));
    true
}

/// Applies a file to the scenario's namespace, and answers name and kind of each object. A kind that was
/// defined just before takes a moment.
async fn applied(stage: &Stage, file: &str, knows_keda: bool) -> Vec<(String, String)> {
    let mut all = Vec::new();
    for mut object in objects(&format!("recipes/{file}")) {
        let kind = object.types.as_ref().map(|types| types.kind.clone()).expect("it has a kind");
        if kind == "ScaledObject" && !knows_keda {
            continue;
        }
        assert_eq!(object.metadata.namespace, None, "{file}: users choose the namespace");
        object.metadata.namespace = Some(stage.cluster.namespace.clone());
        until_accepted(&stage.cluster.client, file, &object).await;
        all.push((object.name_any(), kind));
    }
    let kinds: Vec<&str> = all.iter().map(|(_, kind)| kind.as_str()).collect();
    stage.figure(&format!("{file}: {} accepted", kinds.join(", ")));
    all
}

async fn until_accepted(client: &Client, file: &str, object: &DynamicObject) {
    let started = clock::now();
    while let Err(error) = send(client, object, Mode::Keep).await {
        let is_unknown = matches!(&error, kube::Error::Api(status) if status.code == 404);
        let is_late = started.elapsed() > LIMIT;
        assert!(is_unknown && !is_late, "{file}: {}: {}", object.name_any(), reported(&error));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Does what the controller of volumes would do for a claim.
async fn bind_claim(stage: &Stage, claim: &str) {
    let namespace = &stage.cluster.namespace;
    let volume = json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": claim},
        "spec": {"capacity": {"storage": "1Ti"}, "accessModes": ["ReadWriteOnce"],
            "hostPath": {"path": "/data"}, "persistentVolumeReclaimPolicy": "Retain",
            "claimRef": {"namespace": namespace, "name": claim}}});
    let volume: PersistentVolume = serde_json::from_value(volume).expect("a volume");
    let volumes: Api<PersistentVolume> = Api::all(stage.cluster.client.clone());
    volumes.create(&PostParams::default(), &volume).await.expect("a new volume");
    let bound = json!({"metadata": {"annotations": {"pv.kubernetes.io/bind-completed": "yes"}},
        "spec": {"volumeName": claim}});
    let claims: Api<k8s_openapi::api::core::v1::PersistentVolumeClaim> =
        Api::namespaced(stage.cluster.client.clone(), namespace);
    let patched = claims.patch(claim, &PatchParams::default(), &Patch::Merge(bound)).await;
    patched.unwrap_or_else(|error| panic!("{claim}: {error}"));
}

/// The pods of a recipe, as its controller would make them of the template. There is none here.
fn pods_of(recipe: &Expected) -> Vec<Pod> {
    let is_owner = |object: &DynamicObject| object.data["spec"]["template"].is_object();
    let objects = objects(&format!("recipes/{}", recipe.file));
    let owner = objects.iter().find(|object| is_owner(object)).expect("one with a template");
    let template = &owner.data["spec"]["template"];
    let mut pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"],
        "spec": template["spec"]});
    if pod["metadata"].is_null() {
        pod["metadata"] = json!({});
    }
    let name = |at: usize| format!("{}-{at}", owner.name_any());
    let named = |at: usize| {
        let mut pod: Value = pod.clone();
        pod["metadata"]["name"] = name(at).into();
        serde_json::from_value(pod).unwrap_or_else(|error| panic!("{}: {error}", recipe.file))
    };
    (0..recipe.pods).map(named).collect()
}

/// The stored pod is gpupack's, and its program will know its share.
fn sees_its_share(pod: &Pod, file: &str) {
    let spec = pod.spec.as_ref().expect("a spec");
    assert_eq!(spec.scheduler_name.as_deref(), Some("gpupack"), "{file}");
    assert_eq!(spec.runtime_class_name.as_deref(), Some("nvidia"), "{file}");
    let variables = spec.containers[0].env.iter().flatten();
    let path = |name: &str| {
        let variable = variables.clone().find(|variable| variable.name == name)?;
        variable.value_from.as_ref()?.field_ref.as_ref().map(|field| field.field_path.as_str())
    };
    for (name, key) in [("GPUPACK_MEMORY_MIB", "memory-mib"), ("GPUPACK_DEVICE_UUIDS", "uuids")] {
        let expected = format!("metadata.annotations['placed.gpupack.dev/{key}']");
        assert_eq!(path(name), Some(expected.as_str()), "{file}");
    }
}
