//! Reads everything that the checks look at, and hands it to them.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhook, MutatingWebhookConfiguration, ValidatingAdmissionPolicy,
};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Pod, ResourceQuota, Secret, Service};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::ResourceSlice;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use k8s_openapi::apimachinery::pkg::version::Info;
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use serde_json::Value;

use crate::api::commands::Check;
use crate::api::state::State;
use crate::cli::base::connect::Server;
use crate::cli::base::reader::{Answer, Read, Reader, Target, Unread};
use crate::cli::doctor::finding::{Findings, Of, short};
use crate::cli::doctor::nodes::{Reports, Seen, agents, ends, kubelets, owners};
use crate::cli::doctor::objects::{OwnPod, SeenNode, Workload};
use crate::cli::doctor::parts::{
    Images, configuration, deployment, kubernetes, leader, namespace, versions,
};
use crate::cli::doctor::policies::{compared, of_certificates, shipped, summed_up};
use crate::cli::doctor::proof::certificates::{Served, Shown, Trust, api_service, served};
use crate::cli::doctor::proof::handshake::{self, Door};
use crate::cli::doctor::rights::{self, Places};
use crate::cli::doctor::scheduler::{Expected, of_file};
use crate::cli::doctor::webhook::{
    Trials, configured, devices_policy, dry_run, own, quotas, runtime_classes, start_failures,
    templates, trial, workload_classes,
};
use crate::config::file::Config;
use crate::config::identity::TlsConfig;
use crate::issuing::authority::BUNDLE;
use crate::issuing::objects as issuing;
use crate::rotation::plan::Owner;

/// Objects of gpupack.
const OWN: &str = "&labelSelector=app.kubernetes.io/name%3Dgpupack";

/// Pods of one part of gpupack.
const EXTENDER_PODS: &str = "&labelSelector=app.kubernetes.io/name%3Dgpupack,\
                             app.kubernetes.io/component%3Dextender";
const WEBHOOK_PODS: &str = "&labelSelector=app.kubernetes.io/name%3Dgpupack,\
                            app.kubernetes.io/component%3Dwebhook";
const AGENT_PODS: &str =
    "&labelSelector=app.kubernetes.io/name%3Dgpupack,app.kubernetes.io/component%3Dagent";

/// NVIDIA's DRA driver of GPUs.
const DRA_DRIVER: &str = "gpu.nvidia.com";

/// What to check, and with what.
pub(crate) struct Plan<'a> {
    /// The API server.
    pub(crate) reader: &'a Reader,
    /// The extender.
    pub(crate) server: &'a Server,
    /// Where gpupack is, and where a pod is tried.
    pub(crate) places: Places,
    /// kube-scheduler's configuration, if the user names its file.
    pub(crate) scheduler_file: Option<String>,
    /// The version of this program.
    pub(crate) program: &'a str,
    /// The time of the wall clock, in seconds since 1970.
    pub(crate) now_unix_seconds: i64,
}

/// The parts of gpupack, and how they are configured.
struct Parts {
    extender: Read<Workload>,
    webhook: Read<Workload>,
    scheduler: Read<Workload>,
    extender_pods: Read<Vec<OwnPod>>,
    found: Findings,
    config: Option<Config>,
}

impl Parts {
    /// The service account of the extender.
    fn account(&self) -> String {
        let named = self.extender.as_ref().ok().and_then(|it| it.pods.service_account_name.clone());
        named.unwrap_or_else(|| "gpupack".to_owned())
    }
}

/// Checks everything. `step` learns what is read now.
pub(crate) async fn checked(plan: &Plan<'_>, step: &dyn Fn(&str)) -> Findings {
    step("the API server");
    let (version, reviews) = tokio::join!(version(plan), reviews(plan));
    let mut found = kubernetes(&version);
    found.push(rights::reviewed(&reviews));
    if rights::has_none(&reviews) {
        return found;
    }
    step("namespaces and Deployments");
    let namespaces = namespaces(plan).await;
    let parts = parts(plan).await;
    let agents_in = parts.config.as_ref().map(|config| config.agents.namespace.clone());
    let mut places = plan.places.clone();
    places.agents = agents_in.unwrap_or(places.agents);
    for (name, standard) in [(&places.system, "restricted"), (&places.agents, "privileged")] {
        found.push(namespace(name, &labels_of(&namespaces, name), standard));
    }
    found.push(deployment("extender", &parts.extender));
    found.extend(lease(plan, &parts).await);
    found.extend(parts.found.iter().cloned());
    found.extend(extender_rights(plan, &parts).await);
    step("nodes, agents and their reports");
    let fleet = Fleet::read(plan, &places, parts.config.as_ref()).await;
    found.extend(scheduler(plan, &parts, &fleet).await);
    found.extend(agents(&fleet.seen()));
    found.extend(kubelets(&fleet.seen()));
    found.extend(ends(&fleet.seen()));
    found.extend(owners(&fleet.seen()));
    found.extend(versions_of(plan.program, &parts, &fleet));
    step("runtime, quotas and events");
    found.extend(runtime(plan, &parts, &fleet).await);
    step("admission");
    found.extend(admission(plan, &parts, &namespaces, &places).await);
    found
}

async fn version(plan: &Plan<'_>) -> Read<Info> {
    plan.reader.path("/version").await
}

/// The rights that are needed, and whether the user has them.
async fn reviews(plan: &Plan<'_>) -> Vec<(String, Read<Answer>)> {
    const PATH: &str = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
    let trial = rights::pods(&plan.places.trial);
    let create = (format!("create pods in namespace {}", plan.places.trial), &trial, "create");
    let needed = rights::needed(&plan.places);
    let reads = needed.iter().map(|target| (target.right(), target, target.verb()));
    let asked = reads.chain([create]).map(async |(right, target, verb)| {
        (right, plan.reader.review(PATH, &rights::review(target, verb)).await)
    });
    futures::future::join_all(asked).await
}

type Labels = BTreeMap<String, BTreeMap<String, String>>;

async fn namespaces(plan: &Plan<'_>) -> Read<Labels> {
    let keep = |it: Namespace| {
        (it.metadata.name.unwrap_or_default(), it.metadata.labels.unwrap_or_default())
    };
    let all = plan.reader.list(&rights::namespaces(), "", keep).await?;
    Ok(all.into_iter().collect())
}

fn labels_of(namespaces: &Read<Labels>, name: &str) -> Read<BTreeMap<String, String>> {
    namespaces.as_ref().map_err(Clone::clone)?.get(name).cloned().ok_or(Unread::Absent)
}

async fn parts(plan: &Plan<'_>) -> Parts {
    let Plan { reader, places, .. } = plan;
    let (deployments, pods) = (rights::deployments(places), rights::pods(&places.system));
    let (all, extender_pods) = tokio::join!(
        reader.list(&deployments, OWN, |it: Deployment| Workload::of_deployment(it)),
        reader.list(&pods, EXTENDER_PODS, |it: Pod| OwnPod::of(it)),
    );
    let part = |component: &str| -> Read<Workload> {
        let all = all.as_ref().map_err(Clone::clone)?;
        all.iter().find(|it| it.component == component).cloned().ok_or(Unread::Absent)
    };
    let (extender, webhook, scheduler) = (part("extender"), part("webhook"), part("scheduler"));
    let config_file = match &extender {
        Ok(extender) => file_of(plan, extender).await,
        Err(why) => Err(why.clone()),
    };
    let (found, config) = configuration(&config_file);
    Parts { extender, webhook, scheduler, extender_pods, found, config }
}

/// The file that a part reads from its ConfigMap.
async fn file_of(plan: &Plan<'_>, part: &Workload) -> Read<String> {
    let (map, file) = part.config_map().ok_or(Unread::Absent)?;
    let map: ConfigMap = plan.reader.object(&rights::config_map(&plan.places, &map)).await?;
    map.data.and_then(|mut data| data.remove(&file)).ok_or(Unread::Absent)
}

async fn lease(plan: &Plan<'_>, parts: &Parts) -> Findings {
    let Ok(extender) = &parts.extender else { return Findings::new() };
    let default = Config::default();
    let config = parts.config.as_ref().unwrap_or(&default);
    let target = rights::lease(&config.lease.namespace, &config.lease.name);
    let lease: Read<Lease> = plan.reader.object(&target).await;
    let lease: Read<LeaseSpec> = lease.map(|lease| lease.spec.unwrap_or_default());
    leader(extender, &lease, &parts.extender_pods, plan.now_unix_seconds)
}

/// Nodes and agents.
struct Fleet {
    nodes: Read<Vec<SeenNode>>,
    daemon_set: Read<Workload>,
    pods: Read<Vec<OwnPod>>,
    reports: Read<Reports>,
    of_dra: Read<BTreeSet<String>>,
}

impl Fleet {
    async fn read(plan: &Plan<'_>, places: &Places, config: Option<&Config>) -> Self {
        let reader = plan.reader;
        let (sets, pods) = (rights::daemon_sets(places), rights::pods(&places.agents));
        let sets = reader.list(&sets, OWN, |it: DaemonSet| Workload::of_daemon_set(it)).await;
        let daemon_set = sets.and_then(|sets| {
            sets.into_iter().find(|it| it.component == "agent").ok_or(Unread::Absent)
        });
        let selector = daemon_set.as_ref().ok().and_then(|it| it.pods.node_selector.clone());
        let selector = selector.unwrap_or_default();
        let is_known = daemon_set.is_ok();
        let keep = |node| {
            let seen = SeenNode::of(node, &selector, config);
            SeenNode { is_selected: seen.is_selected && is_known, ..seen }
        };
        let (nodes, slices) = (rights::nodes(), rights::resource_slices());
        let (nodes, pods, of_dra, reports) = tokio::join!(
            reader.list(&nodes, "", keep),
            reader.list(&pods, AGENT_PODS, |it: Pod| OwnPod::of(it)),
            slices_of(reader, &slices),
            plan.server.ask::<State>("/v1/state"),
        );
        Self {
            nodes,
            daemon_set,
            pods,
            reports: reports.map(Reports::of).map_err(|why| Unread::Failed(why.to_string())),
            of_dra: of_dra.map(|nodes| nodes.into_iter().flatten().collect()),
        }
    }

    fn seen(&self) -> Seen<'_> {
        let Self { nodes, daemon_set, pods, reports, of_dra } = self;
        Seen { nodes, daemon_set, pods, reports, of_dra }
    }

    /// Profiles of MIG instances, of agents and of kubelet.
    fn mig_profiles(&self) -> BTreeSet<String> {
        let reported = self.reports.iter().flat_map(|it| it.mig_profiles.iter().cloned());
        let nodes = self.nodes.iter().flatten().flat_map(|it| it.mig_profiles.iter().cloned());
        reported.chain(nodes).collect()
    }
}

/// Nodes whose GPUs NVIDIA's DRA driver gives out, also in a cluster from before version 1 of that group.
async fn slices_of(reader: &Reader, slices: &Target) -> Read<Vec<Option<String>>> {
    let keep = |it: ResourceSlice| {
        Some(it.spec).filter(|spec| spec.driver == DRA_DRIVER).and_then(|spec| spec.node_name)
    };
    match reader.list(slices, "", keep).await {
        Err(Unread::Absent) => {
            let earlier = Target { version: "v1beta1", ..slices.clone() };
            reader.list(&earlier, "", keep).await
        }
        answer => answer,
    }
}

async fn scheduler(plan: &Plan<'_>, parts: &Parts, fleet: &Fleet) -> Findings {
    let of = Of("kube-scheduler configuration");
    let Some(config) = &parts.config else {
        let text = "the extender's configuration, with which it is compared, is not known";
        return vec![of.not_checked(text, "see the check `extender configuration`")];
    };
    let mut found = Findings::new();
    let text = match (&plan.scheduler_file, &parts.scheduler) {
        (Some(text), _) => text.clone(),
        (None, Ok(scheduler)) => {
            found.push(deployment("kube-scheduler for GPU pods", &parts.scheduler));
            match file_of(plan, scheduler).await {
                Ok(text) => text,
                Err(Unread::Absent) => {
                    found.push(of.problem(
                        "its ConfigMap or the file in it is missing",
                        "helm upgrade with your values, or deploy/render and kubectl apply -f \
                         deploy/scheduler.yaml",
                    ));
                    return found;
                }
                Err(why) => {
                    found.push(of.unread("its ConfigMap", &why));
                    return found;
                }
            }
        }
        (None, Err(Unread::Absent)) => return vec![elsewhere(config)],
        (None, Err(why)) => return vec![of.unread("its Deployment", why)],
    };
    let service: Read<Service> = plan.reader.object(&rights::service(&plan.places)).await;
    let service_ips =
        service.map(|service| service.spec.and_then(|spec| spec.cluster_ips).unwrap_or_default());
    let mig_profiles = fleet.mig_profiles();
    let expected = Expected { config, mig_profiles: &mig_profiles, service_ips: &service_ips };
    found.extend(of_file(&text, &expected));
    found
}

/// There is no kube-scheduler of gpupack's own.
fn elsewhere(config: &Config) -> Check {
    let of = Of("kube-scheduler configuration");
    if config.scheduler_names.iter().any(|name| name == "default-scheduler") {
        return of.not_checked(
            "gpupack is in place: the file is on the machines of the control plane",
            "copy it from there (flag --config of kube-scheduler) and run: gpupack doctor \
             --scheduler-config FILE",
        );
    }
    of.problem(
        "there is no kube-scheduler for GPU pods, and gpupack is not in place",
        "kubectl apply -f deploy/scheduler.yaml, or set scheduler_names: [default-scheduler]",
    )
}

fn versions_of(program: &str, parts: &Parts, fleet: &Fleet) -> Findings {
    let of_pods = |pods: &Read<Vec<OwnPod>>| -> Vec<String> {
        pods.iter().flatten().map(|pod| pod.image.clone()).collect()
    };
    let of_part = |part: &Read<Workload>| -> Vec<String> {
        part.iter().map(|part| part.image().to_owned()).collect()
    };
    let or = |pods: Vec<String>, part: &Read<Workload>| {
        if pods.is_empty() { of_part(part) } else { pods }
    };
    let extender = or(of_pods(&parts.extender_pods), &parts.extender);
    let agents = or(of_pods(&fleet.pods), &fleet.daemon_set);
    let webhook = of_part(&parts.webhook);
    let all = [("extender", &extender), ("webhook", &webhook), ("agents", &agents)];
    let images = all
        .map(|(part, images)| Images { part, images: images.iter().map(String::as_str).collect() });
    versions(program, &images)
}

async fn runtime(plan: &Plan<'_>, parts: &Parts, fleet: &Fleet) -> Findings {
    let of_pods = parts.config.as_ref().and_then(|it| it.webhook.runtime_class.clone());
    let of_agents =
        fleet.daemon_set.as_ref().ok().and_then(|it| it.pods.runtime_class_name.clone());
    let names: BTreeSet<String> = of_pods.into_iter().chain(of_agents).collect();
    let mut classes = Vec::new();
    for name in &names {
        let class: Read<Value> = plan.reader.object(&rights::runtime_class(name)).await;
        classes.push((name.as_str(), class.map(drop)));
    }
    let mut found = match &parts.config {
        None if classes.is_empty() => vec![Of("container runtime").not_checked(
            "which RuntimeClass pods of gpupack name is not known",
            "see the check `extender configuration`",
        )],
        None | Some(_) => runtime_classes(&classes),
    };
    let event = |it: Event| {
        let about = it.regarding.unwrap_or_default();
        let (place, name) = (about.namespace.unwrap_or_default(), about.name.unwrap_or_default());
        (format!("{place}/{name}"), short(&it.note.unwrap_or_default()))
    };
    let quota = |it: ResourceQuota| {
        let (place, name) = (it.metadata.namespace, it.metadata.name);
        let keys = it.spec.and_then(|spec| spec.hard).unwrap_or_default().into_keys();
        (format!("{}/{}", place.unwrap_or_default(), name.unwrap_or_default()), keys.collect())
    };
    let class =
        |it: PriorityClass| (it.metadata.name.unwrap_or_default(), it.value.unwrap_or_default());
    let (events, all_quotas) = (rights::events(), rights::quotas());
    let all_classes = rights::priority_classes();
    let (events, all_quotas, all_classes) = tokio::join!(
        plan.reader.list(&events, "&fieldSelector=reason%3DGpuStartFailed", event),
        plan.reader.list(&all_quotas, "", quota),
        plan.reader.list(&all_classes, "", class),
    );
    found.push(start_failures(&events));
    found.push(quotas(&all_quotas));
    let all_classes = all_classes.map(BTreeMap::from_iter);
    found.push(workload_classes(parts.config.as_ref(), &all_classes));
    found
}

async fn admission(
    plan: &Plan<'_>,
    parts: &Parts,
    namespaces: &Read<Labels>,
    places: &Places,
) -> Findings {
    let configurations = plan
        .reader
        .list(&rights::webhooks(), OWN, |it: MutatingWebhookConfiguration| it.webhooks)
        .await;
    let webhooks =
        configurations.map(|all| all.into_iter().flatten().flatten().collect::<Vec<_>>());
    let config = parts.config.as_ref();
    let unsent =
        webhooks.as_ref().ok().zip(config).and_then(|(all, config)| templates(all, config));
    let webhook = webhooks.map(own);
    let there = namespaces.as_ref().map(|all| all.keys().cloned().collect());
    let there = there.map_err(Clone::clone);
    let mut found = Findings::new();
    let is_installed = matches!(&webhook, Ok(Some(_)));
    if is_installed || parts.webhook.is_ok() {
        found.push(deployment("webhook", &parts.webhook));
    }
    found.extend(configured(&webhook, config, &there, [&places.system, &places.agents]));
    let webhook = webhook.ok().flatten();
    if let Some(webhook) = &webhook {
        found.extend(unsent);
        found.extend(dry_runs(plan, webhook, config).await);
        let target = rights::policy("validatingadmissionpolicies", "gpupack-devices");
        let policy: Read<ValidatingAdmissionPolicy> = plan.reader.object(&target).await;
        found.extend(devices_policy(&policy, config));
    }
    found.extend(policies(plan, parts).await);
    found.extend(certificates(plan, parts, webhook.as_ref()).await);
    found
}

async fn dry_runs(plan: &Plan<'_>, webhook: &MutatingWebhook, config: Option<&Config>) -> Findings {
    let namespace = &plan.places.trial;
    let path = format!("/api/v1/namespaces/{namespace}/pods?dryRun=All");
    let scheduler = config.and_then(|config| config.scheduler_names.first());
    let scheduler = scheduler.map_or("gpupack", String::as_str);
    let good = trial("gpupack-doctor", "0.5", scheduler);
    let bad = trial("gpupack-doctor", "2", scheduler);
    let (good, bad) =
        tokio::join!(plan.reader.review(&path, &good), plan.reader.review(&path, &bad));
    let trials = Trials { namespace, good: &good, bad: &bad };
    dry_run(&trials, Some(webhook), config)
}

/// The rights of the extender for what is configured.
async fn extender_rights(plan: &Plan<'_>, parts: &Parts) -> Findings {
    const PATH: &str = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
    let needed = parts.config.as_ref().map(rights::of_extender).unwrap_or_default();
    let account = parts.account();
    let asked = needed.into_iter().map(async |right| {
        let review = right.review(&plan.places.system, &account);
        (right, plan.reader.review(PATH, &review).await)
    });
    rights::held(&futures::future::join_all(asked).await)
}

async fn policies(plan: &Plan<'_>, parts: &Parts) -> Findings {
    let account = parts.account();
    let mut found = Vec::new();
    let certificates = parts.config.as_ref().and_then(|config| config.certificates.as_ref());
    let system = &plan.places.system;
    let further = match certificates.is_some_and(|it| it.make || it.publish_ca_bundles) {
        true => of_certificates(system, &account),
        false => Vec::new(),
    };
    for policy in shipped(system, &account).into_iter().chain(further) {
        let target = rights::policy(policy.resource, &policy.name);
        let object: Read<Value> = plan.reader.object(&target).await;
        found.push(compared(&policy, &object));
    }
    summed_up(found)
}

/// The name of a file without its folder.
fn file_name(path: &std::path::Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

/// The Secret with this file of a part, if the part mounts one.
async fn secret_of(
    plan: &Plan<'_>,
    part: &Read<Workload>,
    path: &std::path::Path,
) -> Option<(String, Read<Shown>)> {
    let name = part.as_ref().ok()?.secret_of(path.to_str()?)?;
    let shown = shown(plan, &name).await;
    Some((name, shown))
}

async fn shown(plan: &Plan<'_>, name: &str) -> Read<Shown> {
    let secret: Read<Secret> = plan.reader.object(&rights::secret(&plan.places, name)).await;
    let data =
        secret.map(|secret| -> BTreeMap<String, ByteString> { secret.data.unwrap_or_default() });
    data.map(Shown::of)
}

async fn certificates(
    plan: &Plan<'_>,
    parts: &Parts,
    webhook: Option<&MutatingWebhook>,
) -> Findings {
    let target: Target = rights::api_service();
    let service: Read<APIService> = plan.reader.object(&target).await;
    let Some(config) = &parts.config else { return Findings::new() };
    let mut found = api_service(&service, config.tls.is_some());
    let path = &config.webhook.certificate_file;
    if let Some(secret) = secret_of(plan, &parts.webhook, path).await {
        let client = webhook.map(|webhook| &webhook.client_config);
        let called = client.and_then(|client| {
            called_name(
                client.service.as_ref().map(|it| (&*it.name, &*it.namespace)),
                client.url.as_deref(),
            )
        });
        let called = called.unwrap_or_default();
        let file = file_name(path);
        let port = config.webhook.listen.port();
        let (seen_in, shown) = seen(plan, secret, (WEBHOOK_PODS, port), (&called, file)).await;
        let ca = client.and_then(|client| client.ca_bundle.as_ref()).map(|ca| &*ca.0);
        let fix = "set it to the CA of the certificate (docs/admission.md#install)";
        let from = "caBundle of the MutatingWebhookConfiguration";
        let trusts = [Trust { from, ca, name: &called, fix }];
        let trusts = if webhook.is_some() { &trusts[..] } else { &[] };
        let check = "certificate of the webhook";
        let it = Served { check, from: &seen_in, file, shown: &shown };
        found.extend(served(&it, trusts, plan.now_unix_seconds));
    }
    if let Some(tls) = &config.tls {
        found.extend(of_the_extender(plan, parts, (config, tls), &service).await);
    }
    found
}

/// Its certificate is in the Secret that it fills itself, or in one that it mounts.
async fn of_the_extender(
    plan: &Plan<'_>,
    parts: &Parts,
    (config, tls): (&Config, &TlsConfig),
    service: &Read<APIService>,
) -> Findings {
    let files = (file_name(&tls.certificate_file), file_name(&tls.ca_file));
    let (secret, (file, ca_file)) = if config.certificates.as_ref().is_some_and(|it| it.make) {
        let name = issuing::secret_of(Owner::Extender);
        (Some((name.to_owned(), shown(plan, name).await)), (issuing::CERTIFICATE, BUNDLE))
    } else {
        (secret_of(plan, &parts.extender, &tls.certificate_file).await, files)
    };
    let Some(secret) = secret else {
        return vec![Of("certificate of the extender").not_checked(
            "the extender has `tls`, but mounts no Secret with its certificate",
            "check the volume for tls.certificate_file",
        )];
    };
    let spec = service.as_ref().ok().and_then(|service| service.spec.as_ref());
    let called = spec.and_then(|spec| spec.service.as_ref());
    let called = called
        .and_then(|it| called_name(Some((it.name.as_deref()?, it.namespace.as_deref()?)), None));
    let called = called.unwrap_or_default();
    let asked_by = if called.is_empty() { tls.replica_name.as_str() } else { &called };
    let port = config.page_listen.port();
    let (from, shown) = seen(plan, secret, (EXTENDER_PODS, port), (asked_by, file)).await;
    let of_service = Trust {
        from: "caBundle of the APIService",
        ca: spec.and_then(|spec| spec.ca_bundle.as_ref()).map(|ca| &*ca.0),
        name: &called,
        fix: "set it to the CA of the certificate (deploy/api-service.yaml says how)",
    };
    let own_ca = shown.as_ref().ok().and_then(|shown| shown.file(ca_file));
    let of_replicas = Trust {
        from: "its own CA",
        ca: own_ca,
        name: &tls.replica_name,
        fix: "make a certificate of that CA with the name tls.replica_name",
    };
    // A handshake shows no CA.
    let has_own_ca = own_ca.is_some() || !from.starts_with(POD);
    let trusts = [(has_own_ca, of_replicas), (spec.is_some(), of_service)];
    let trusts: Vec<Trust<'_>> =
        trusts.into_iter().filter_map(|(is_known, trust)| is_known.then_some(trust)).collect();
    let it = Served { check: "certificate of the extender", from: &from, file, shown: &shown };
    served(&it, &trusts, plan.now_unix_seconds)
}

/// What a certificate that was seen in a handshake begins with.
const POD: &str = "pod ";

/// Where a certificate was seen, and what: in its Secret, or, where that may not be read, in a handshake with a
/// ready pod that serves it, if the user may forward its port.
async fn seen(
    plan: &Plan<'_>,
    (secret, shown): (String, Read<Shown>),
    (pods, port): (&str, u16),
    (called, file): (&str, &str),
) -> (String, Read<Shown>) {
    const REVIEWS: &str = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
    let namespace = plan.places.system.as_str();
    let from = format!("Secret {secret}");
    let Err(Unread::Forbidden(right)) = &shown else { return (from, shown) };
    let review = plan.reader.review(REVIEWS, &handshake::review(namespace)).await;
    if !handshake::is_allowed(&review) {
        return (from, shown);
    }
    let all = plan.reader.list(&rights::pods(namespace), pods, |it: Pod| OwnPod::of(it)).await;
    let ready = all.into_iter().flatten().find(|pod| pod.is_ready);
    let Some(pod) = ready else { return (from, shown) };
    let door = Door { namespace, pod: &pod.name, port, called };
    match handshake::chain(plan.reader, &door).await {
        Ok(chain) => (format!("{POD}{}", pod.name), Ok(Shown::seen(file, &chain))),
        Err(why) => {
            let why = format!("{right}, or a handshake with pod {}: {}", pod.name, short(&why));
            (from, Err(Unread::Forbidden(why)))
        }
    }
}

/// The name by which the API server calls a Service, or an address.
fn called_name(service: Option<(&str, &str)>, url: Option<&str>) -> Option<String> {
    if let Some((name, namespace)) = service {
        return Some(format!("{name}.{namespace}.svc"));
    }
    url?.parse::<hyper::Uri>().ok()?.host().map(str::to_owned)
}
