//! The keeper of certificates on an API server that loses, refuses and conflicts, with hostile contents, and in
//! virtual time.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::ByteString;
use kube_api::config::file::Config;
use kube_api::request::placement::FenceWriter;
use kube_api::write::carry_out;
use kube_api::write::term::Term;
use kube_api::write::writer::ApiWriter;
use runtime::certificates::{CertificateFiles, Certificates};
use runtime::clock::{Clock, SimulatedTime};
use runtime::step::outside::Outside;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use serde_json::{Value, json};
use server::issuing::keeper::{CertificateReport, KeepError, Keeper, Role};
use server::issuing::pair::{Pair, Usage, Wanted, make_ca, sign};
use server::rotation::plan::{CertificateOwner, UnixTime, Validity};
use wire::units::Timestamp;

use crate::harness::log::Log;
use crate::harness::objects::{Objects, WriteFault};

const CA: &str = "/api/v1/namespaces/gpu-system/secrets/gpupack-ca";
const EXTENDER: &str = "/api/v1/namespaces/gpu-system/secrets/gpupack-extender-tls";
const SCHEDULER: &str = "/api/v1/namespaces/gpu-system/secrets/gpupack-scheduler-tls";
const WEBHOOK: &str = "/api/v1/namespaces/gpu-system/secrets/gpupack-webhook-tls";
const AGENTS: &str = "/api/v1/namespaces/gpupack-agents/configmaps/gpupack-ca";
const WEBHOOKS: &str =
    "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/gpupack";
const SERVICE: &str = "/apis/apiregistration.k8s.io/v1/apiservices/v1.inspection.gpupack.dev";

/// When the tests begin: after this year nothing is special.
const START: u64 = 1_900_000_000;

const NAMES: [(&str, &str, Usage); 8] = [
    (EXTENDER, "gpupack-extender", Usage::Both),
    (EXTENDER, "gpupack", Usage::Server),
    (EXTENDER, "gpupack.gpu-system", Usage::Server),
    (EXTENDER, "gpupack.gpu-system.svc.cluster.local", Usage::Server),
    (EXTENDER, "gpupack.gpu-system.svc", Usage::Server),
    (SCHEDULER, "gpupack-scheduler", Usage::Client),
    (WEBHOOK, "gpupack-webhook.gpu-system.svc", Usage::Server),
    (WEBHOOK, "gpupack-webhook.gpu-system.svc.cluster.local", Usage::Server),
];

/// An installation with empty objects, as `deploy/certificates.yaml` has them.
fn installed() -> Objects {
    let objects = Objects::default();
    let meta = |namespace: &str, path: &str| {
        let name = path.rsplit('/').next().unwrap();
        json!({"name": name, "namespace": namespace, "labels": {"of": "the installation"}})
    };
    for path in [CA, EXTENDER, SCHEDULER, WEBHOOK] {
        objects.put(path, json!({"metadata": meta("gpu-system", path), "type": "Opaque"}));
    }
    objects.put(AGENTS, json!({"metadata": meta("gpupack-agents", AGENTS), "data": {"kept": "x"}}));
    let hook = |name: &str| {
        json!({"name": name, "admissionReviewVersions": ["v1"], "sideEffects": "None",
            "failurePolicy": "Fail", "clientConfig": {"url": "https://x/"}})
    };
    objects.put(
        WEBHOOKS,
        json!({"metadata": {"name": "gpupack"}, "webhooks": [hook("a.x.dev"), hook("b.x.dev")]}),
    );
    objects.put(
        SERVICE,
        json!({"metadata": {"name": "v1.inspection.gpupack.dev"},
            "spec": {"group": "inspection.gpupack.dev", "version": "v1", "groupPriorityMinimum": 1,
                "versionPriority": 15}}),
    );
    objects
}

/// A replica: its keeper, its folder, its clock.
struct Replica {
    keeper: Keeper,
    folder: tempfile::TempDir,
    time: &'static SimulatedTime,
}

impl Replica {
    fn new(objects: &Objects, section: &str) -> Self {
        let time: &'static SimulatedTime = Box::leak(Box::new(SimulatedTime::starting(START)));
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name).display().to_string();
        let text = format!(
            "tls: {{ certificate_file: {}, key_file: {}, ca_file: {} }}\ncertificates: {section}",
            file("tls.crt"),
            file("tls.key"),
            file("ca.crt"),
        );
        let config = Config::from_yaml(&text).unwrap();
        let clock = Clock::simulated(time);
        let outside = Outside::new(clock);
        tokio::spawn(carry_out::run(outside.clone(), Some(objects.client()), None));
        let term = Term::alone(clock, FenceWriter::random());
        let writer = ApiWriter::new(outside, Duration::from_secs(5), term);
        let keeper = Keeper::new(&config, writer, clock).unwrap();
        Self { keeper, folder, time }
    }

    fn make(objects: &Objects) -> Self {
        Self::new(objects, "{ make: true }")
    }

    async fn pass(&mut self) -> Result<CertificateReport, KeepError> {
        self.keeper.pass(Role::Writes).await
    }

    fn file(&self, name: &str) -> String {
        std::fs::read_to_string(self.folder.path().join(name)).unwrap_or_default()
    }

    /// The files that it serves from fit together.
    fn serves(&self) {
        let path = |name: &str| -> PathBuf { self.folder.path().join(name) };
        let files = CertificateFiles {
            own: Some((path("tls.crt"), path("tls.key"))),
            ca: Some(path("ca.crt")),
            read_every: Duration::from_secs(1),
        };
        Certificates::read(files).unwrap();
        let mode = std::fs::metadata(path("tls.key")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    fn at(&self, seconds: u64) {
        self.time.set(Timestamp::from_millis(seconds * 1_000));
    }
}

/// A value of a Secret, in plain.
fn value(objects: &Objects, path: &str, key: &str) -> String {
    let found: Option<ByteString> =
        serde_json::from_value(objects.at(path)["data"][key].clone()).unwrap();
    String::from_utf8(found.unwrap_or_default().0).unwrap()
}

fn bundle_of(text: &Value) -> String {
    let found: Option<ByteString> = serde_json::from_value(text.clone()).unwrap();
    String::from_utf8(found.unwrap_or_default().0).unwrap()
}

fn data(values: &[(&str, &str)]) -> Value {
    let values = values.iter().map(|(key, text)| ((*key).to_owned(), ByteString((*text).into())));
    json!(values.collect::<BTreeMap<String, ByteString>>())
}

/// Whether one that trusts this bundle accepts this certificate now, with this name.
fn accepts(bundle: &str, certificate: &str, (name, usage): (&str, Usage), now: u64) -> bool {
    let roots: Vec<CertificateDer<'static>> =
        CertificateDer::pem_slice_iter(bundle.as_bytes()).collect::<Result<_, _>>().unwrap();
    let anchors: Vec<_> =
        roots.iter().map(|root| webpki::anchor_from_trusted_cert(root).unwrap()).collect();
    let Ok(der) = CertificateDer::from_pem_slice(certificate.as_bytes()) else { return false };
    let end = webpki::EndEntityCert::try_from(&der).unwrap();
    let time = rustls::pki_types::UnixTime::since_unix_epoch(Duration::from_secs(now));
    let verify = |usage| {
        end.verify_for_usage(webpki::ALL_VERIFICATION_ALGS, &anchors, &[], time, usage, None, None)
            .is_ok()
    };
    (!usage.is_server() || verify(webpki::KeyUsage::server_auth()))
        && (!usage.is_client() || verify(webpki::KeyUsage::client_auth()))
        && end.verify_is_valid_for_subject_name(&ServerName::try_from(name).unwrap()).is_ok()
}

/// All that is kept fits together, and is in each place.
fn check(objects: &Objects, now: u64) {
    let bundle = value(objects, CA, "ca.crt");
    for (path, name, usage) in NAMES {
        let certificate = value(objects, path, "tls.crt");
        assert!(accepts(&bundle, &certificate, (name, usage), now), "{path} {name}");
        assert_eq!(value(objects, path, "ca.crt"), bundle, "{path}");
    }
    assert!(!accepts(
        &bundle,
        &value(objects, SCHEDULER, "tls.crt"),
        ("gpupack-scheduler", Usage::Server),
        now
    ));
    assert!(!accepts(
        &bundle,
        &value(objects, WEBHOOK, "tls.crt"),
        ("gpupack-webhook.gpu-system.svc", Usage::Client),
        now
    ));
    assert_eq!(objects.at(AGENTS)["data"]["ca.crt"], bundle);
    for hook in objects.at(WEBHOOKS)["webhooks"].as_array().unwrap() {
        assert_eq!(bundle_of(&hook["clientConfig"]["caBundle"]), bundle);
        assert_eq!(hook["failurePolicy"], "Fail", "the rest stays");
    }
    assert_eq!(bundle_of(&objects.at(SERVICE)["spec"]["caBundle"]), bundle);
    assert_eq!(objects.at(AGENTS)["data"]["kept"], "x");
    assert_eq!(objects.at(CA)["metadata"]["labels"]["of"], "the installation");
}

#[tokio::test]
async fn empty_objects_are_filled_and_stay_as_they_are() {
    let objects = installed();
    let mut replica = Replica::make(&objects);
    let report = replica.pass().await.unwrap();
    check(&objects, START);
    replica.serves();
    assert_eq!(replica.file("ca.crt"), value(&objects, CA, "ca.crt"));
    assert_eq!(replica.file("tls.key"), value(&objects, EXTENDER, "tls.key"));
    let days = |seconds: u64| Some(UnixTime(START + seconds * 86_400));
    assert_eq!(report.ca_ends, days(3_650), "ten years");
    assert!(CertificateOwner::ALL.iter().all(|owner| report.ends.get(owner).copied() == days(90)));
    let writes = objects.writes().len();
    replica.pass().await.unwrap();
    assert_eq!(objects.writes().len(), writes, "nothing is due");
    // Another replica serves the same.
    let mut other = Replica::make(&objects);
    assert_eq!(other.keeper.pass(Role::Reads).await.unwrap().ca_ends, days(3_650));
    assert_eq!(objects.writes().len(), writes);
    assert_eq!(other.file("tls.crt"), replica.file("tls.crt"));
}

#[tokio::test]
async fn replicas_that_start_at_once_end_with_one_ca() {
    for _ in 0..8 {
        let objects = installed();
        let (mut a, mut b) = (Replica::make(&objects), Replica::make(&objects));
        let (first, second) = tokio::join!(a.pass(), b.pass());
        first.unwrap();
        second.unwrap();
        a.pass().await.unwrap();
        check(&objects, START);
        let cas = objects.writes().iter().filter(|write| write.ends_with("/gpupack-ca")).count();
        assert!(cas >= 2, "both tried to make a CA");
        for replica in [&a, &b] {
            assert_eq!(
                replica.file("ca.crt"),
                value(&objects, CA, "ca.crt"),
                "the loser has it too"
            );
            replica.serves();
        }
    }
}

#[tokio::test]
async fn a_crash_or_a_lost_answer_at_any_write_leaves_a_state_from_which_the_next_run_goes_on() {
    for fault in [
        WriteFault::CutAfter,
        WriteFault::CutBefore,
        WriteFault::WrittenBefore,
        WriteFault::Refused(500),
        WriteFault::Refused(409),
    ] {
        for place in 0..7 {
            let objects = installed();
            let mut faults = vec![WriteFault::None; place];
            faults.push(fault);
            objects.fail(&faults);
            let mut first = Replica::make(&objects);
            let ended = first.pass().await;
            let lost = matches!(
                fault,
                WriteFault::CutBefore | WriteFault::CutAfter | WriteFault::Refused(500)
            );
            assert_eq!(ended.is_err(), lost, "{fault:?} at {place}: {ended:?}");
            let ca = value(&objects, CA, "ca.crt");
            drop(first);
            Replica::make(&objects).pass().await.unwrap();
            check(&objects, START);
            let now = value(&objects, CA, "ca.crt");
            assert!(ca.is_empty() || ca == now, "{fault:?} at {place}: one CA is enough");
        }
    }
}

#[tokio::test]
async fn what_may_not_be_written_is_reported_and_stops_nothing_else() {
    let objects = installed();
    objects.forbid(WEBHOOKS);
    let mut replica = Replica::make(&objects);
    let error = replica.pass().await.unwrap_err().to_string();
    assert!(error.contains("MutatingWebhookConfiguration") && error.contains("403"), "{error}");
    replica.serves();
    assert_eq!(objects.at(AGENTS)["data"]["ca.crt"], value(&objects, CA, "ca.crt"));
    let mut starting = Replica::make(&objects);
    starting.keeper.start().await;
    starting.serves();
}

#[tokio::test]
async fn objects_that_are_not_installed_are_no_error_but_two_are_needed() {
    let objects = installed();
    for path in [SCHEDULER, WEBHOOK, AGENTS, WEBHOOKS, SERVICE] {
        objects.remove(path);
    }
    let mut replica = Replica::make(&objects);
    replica.pass().await.unwrap();
    replica.serves();
    for path in [EXTENDER, CA] {
        let objects = installed();
        objects.remove(path);
        let error = Replica::make(&objects).pass().await.unwrap_err().to_string();
        let name = path.rsplit('/').next().unwrap();
        assert!(error.contains(name) && error.contains("create it empty"), "{error}");
    }
}

/// What somebody put into a Secret.
fn hostile(objects: &Objects) -> Vec<(&'static str, Value)> {
    let at = |seconds: i64| UnixTime(START.saturating_add_signed(seconds));
    let validity = Validity { starts: at(-100), ends: at(80 * 86_400) };
    let other = make_ca("other", validity).unwrap();
    let ours =
        Pair { certificate: value(objects, CA, "ca.crt"), key: value(objects, CA, "ca.key") };
    let names = |names: &[&str]| -> Vec<String> { names.iter().map(ToString::to_string).collect() };
    let webhook =
        names(&["gpupack-webhook.gpu-system.svc", "gpupack-webhook.gpu-system.svc.cluster.local"]);
    let signed = |ca, names: &[String], usage, validity| {
        let pair = sign(ca, Wanted { names, usage, validity }).unwrap();
        data(&[("tls.crt", &pair.certificate), ("tls.key", &pair.key)])
    };
    let ended = Validity { ends: at(-1), ..validity };
    let later = Validity { starts: at(9), ..validity };
    let (certificate, key) =
        (value(objects, WEBHOOK, "tls.crt"), value(objects, WEBHOOK, "tls.key"));
    let long = "x".repeat(900_000);
    let many = certificate.repeat(500);
    vec![
        (
            "garbage",
            data(&[("tls.crt", "\u{0}\u{fffd}"), ("tls.key", "-----BEGIN PRIVATE KEY-----")]),
        ),
        ("long", data(&[("tls.crt", &long), ("tls.key", &long)])),
        ("many", data(&[("tls.crt", &many), ("tls.key", &key)])),
        ("no key", data(&[("tls.crt", &certificate)])),
        ("another key", data(&[("tls.crt", &certificate), ("tls.key", &other.key)])),
        ("a CA", data(&[("tls.crt", &other.certificate), ("tls.key", &other.key)])),
        ("of another CA", signed(&other, &webhook, Usage::Server, validity)),
        ("other names", signed(&ours, &webhook[..1], Usage::Server, validity)),
        ("other use", signed(&ours, &webhook, Usage::Client, validity)),
        ("ended", signed(&ours, &webhook, Usage::Server, ended)),
        ("not yet", signed(&ours, &webhook, Usage::Server, later)),
        ("PEM of DER that ends early", {
            let half =
                pem::encode(&pem::Pem::new("CERTIFICATE", vec![0x30, 0x82, 0xff, 0xff, 0x30]));
            data(&[("tls.crt", &half), ("tls.key", &key)])
        }),
    ]
}

#[tokio::test]
async fn a_certificate_that_cannot_be_used_is_made_again() {
    let objects = installed();
    let mut replica = Replica::make(&objects);
    replica.pass().await.unwrap();
    let ca = value(&objects, CA, "ca.crt");
    for (what, values) in hostile(&objects) {
        let mut secret = objects.at(WEBHOOK);
        secret["data"] = values;
        objects.put(WEBHOOK, secret);
        replica.pass().await.unwrap_or_else(|error| panic!("{what}: {error}"));
        check(&objects, START);
        assert_eq!(value(&objects, CA, "ca.crt"), ca, "{what}: the CA stays");
    }
}

#[tokio::test]
async fn a_ca_that_cannot_be_used_is_made_again_and_everything_with_it() {
    let objects = installed();
    let mut replica = Replica::make(&objects);
    replica.pass().await.unwrap();
    let other = value(&objects, WEBHOOK, "tls.key");
    for (key, text) in [
        ("ca.crt", "garbage".to_owned()),
        ("ca.key", other),
        ("ca.crt", value(&objects, WEBHOOK, "tls.crt")),
        ("ca.key", "x".repeat(900_000)),
    ] {
        let before = value(&objects, CA, "ca.crt");
        let mut secret = objects.at(CA);
        secret["data"][key] = json!(ByteString(text.into()));
        objects.put(CA, secret);
        replica.pass().await.unwrap();
        check(&objects, START);
        assert_ne!(value(&objects, CA, "ca.crt"), before);
    }
}

#[tokio::test]
async fn certificates_are_signed_again_at_a_third_of_their_life_and_the_ca_never() {
    const DAY: u64 = 86_400;
    let objects = installed();
    let mut replica = Replica::make(&objects);
    replica.pass().await.unwrap();
    let (ca, writes) = (value(&objects, CA, "ca.crt"), objects.writes().len());
    replica.at(30 * DAY - 1);
    replica.pass().await.unwrap();
    assert_eq!(objects.writes().len(), writes);
    for month in (30..3_600).step_by(30) {
        replica.at(month * DAY);
        let report = replica.pass().await.unwrap();
        let ends = Some(UnixTime(START + (month + 90).min(3_650) * DAY));
        assert!(
            CertificateOwner::ALL.iter().all(|owner| report.ends.get(owner).copied() == ends),
            "{month}"
        );
        check(&objects, START + month * DAY);
    }
    replica.at(3_650 * DAY);
    let writes = objects.writes().len();
    for role in [Role::Writes, Role::Reads] {
        assert!(matches!(replica.keeper.pass(role).await, Err(KeepError::Ended)));
    }
    assert_eq!(objects.writes().len(), writes);
    assert_eq!(value(&objects, CA, "ca.crt"), ca);
    // It is replaced as docs/install.md says.
    let mut secret = objects.at(CA);
    secret["data"] = Value::Null;
    objects.put(CA, secret);
    replica.pass().await.unwrap();
    check(&objects, START + 3_650 * DAY);
    assert_ne!(value(&objects, CA, "ca.crt"), ca);
}

#[tokio::test]
async fn a_clock_before_the_ca_changes_nothing() {
    let objects = installed();
    Replica::make(&objects).pass().await.unwrap();
    let writes = objects.writes().len();
    let mut late = Replica::make(&objects);
    late.time.step_wall(-100 * 86_400);
    assert!(matches!(late.pass().await, Err(KeepError::Clock)));
    assert_eq!(objects.writes().len(), writes);
}

#[tokio::test]
async fn a_clock_that_is_far_from_the_api_servers_replaces_nothing() {
    const YEARS: i64 = 20 * 365 * 86_400;
    let objects = installed();
    objects.is_at(START);
    let mut replica = Replica::make(&objects);
    replica.pass().await.unwrap();
    let (writes, served) = (objects.writes().len(), replica.file("tls.crt"));
    for (step, says) in
        [(YEARS, "a year ahead of"), (-YEARS, "a year behind"), (85 * 86_400, "a month ahead")]
    {
        replica.time.step_wall(step);
        for role in [Role::Writes, Role::Reads] {
            let ended = replica.keeper.pass(role).await;
            let is_late = step == 85 * 86_400 && role == Role::Reads;
            assert_eq!(ended.is_ok(), is_late, "{says}: only what is due is refused: {ended:?}");
            let error = ended.map_or_else(|error| error.to_string(), |_| says.to_owned());
            assert!(error.contains(says), "{error}");
        }
        assert_eq!(objects.writes().len(), writes, "{says}");
        assert_eq!(replica.file("tls.crt"), served, "{says}");
        replica.time.step_wall(-step);
    }
    // Nor is a first CA made, which others would not believe.
    let objects = installed();
    objects.is_at(START + 601);
    let mut first = Replica::make(&objects);
    assert!(matches!(first.pass().await, Err(KeepError::Clocks(_))));
    assert_eq!(objects.writes().len(), 0);
    objects.is_at(START + 599);
    first.pass().await.unwrap();
    check(&objects, START);
    // What is due is made when both clocks say so.
    objects.is_at(START + 85 * 86_400);
    first.at(85 * 86_400);
    first.pass().await.unwrap();
    check(&objects, START + 85 * 86_400);
}

#[tokio::test]
async fn a_fault_is_logged_when_it_begins_and_tried_again_with_growing_pauses() {
    let log = Log::new();
    let warnings = |part: &str| {
        let text = log.text();
        text.lines().filter(|line| line.contains("WARN") && line.contains(part)).count()
    };
    let objects = installed();
    let mut replica = Replica::make(&objects);
    for begun in 1..=2 {
        objects.forbid(WEBHOOKS);
        let mut configured = objects.at(WEBHOOKS);
        configured["webhooks"][0]["clientConfig"] = json!({"url": "https://x/"});
        objects.put(WEBHOOKS, configured);
        let mut secret = objects.at(WEBHOOK);
        secret["data"] = data(&[("tls.crt", "garbage"), ("tls.key", "garbage")]);
        objects.put(WEBHOOK, secret);
        objects.remove(AGENTS);
        let mut pauses = Vec::new();
        for _ in 0..6 {
            replica.pass().await.unwrap_err();
            pauses.push(replica.keeper.pause().as_secs());
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 30]);
        assert_eq!(warnings("cannot write `MutatingWebhookConfiguration`"), begun);
        assert_eq!(warnings("there is no ConfigMap"), begun);
        assert_eq!(warnings("`tls.crt` is not in PEM"), begun, "and the certificate is made again");
        objects.permit(WEBHOOKS);
        let map = json!({"metadata": {"name": "gpupack-ca", "namespace": "gpupack-agents"}, "data": {"kept": "x"}});
        objects.put(AGENTS, map);
        replica.pass().await.unwrap();
        assert_eq!(replica.keeper.pause().as_secs(), 60);
        check(&objects, START);
    }
}

/// How far the version before was with a change of its CA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The next CA is in the bundle, which is not in all places yet.
    Added,
    /// The next CA signs, and the certificates are still of the earlier one.
    Switched,
}

/// What the version before left: the earlier and the later CA. Certificates are of the earlier one.
fn change_begun(objects: &Objects, stage: Stage) -> [Pair; 2] {
    let validity =
        |ends: u64| Validity { starts: UnixTime(START - 9), ends: UnixTime(START + ends) };
    let cas = [("earlier", 3_000), ("later", 9_000)];
    let [earlier, later] = cas.map(|(name, ends)| make_ca(name, validity(ends)).unwrap());
    let all = |first: &Pair, second: &Pair| format!("{}{}", first.certificate, second.certificate);
    let (bundle, key) = match stage {
        Stage::Added => (all(&earlier, &later), &earlier.key),
        Stage::Switched => (all(&later, &earlier), &later.key),
    };
    let put = |path: &str, values: &[(&str, &str)]| {
        let mut secret = objects.at(path);
        secret["data"] = data(values);
        objects.put(path, secret);
    };
    let mut values = vec![
        ("ca.crt", &*bundle),
        ("ca.key", key),
        ("rotation.json", r#"{"added":1900000000,"published":null,"old":{}}"#),
    ];
    if stage == Stage::Added {
        values.extend([("next.crt", &*later.certificate), ("next.key", &*later.key)]);
    }
    put(CA, &values);
    for path in [EXTENDER, SCHEDULER, WEBHOOK] {
        let of_it = NAMES.iter().filter(|(of, ..)| *of == path);
        let names: Vec<String> = of_it.clone().map(|(_, name, _)| (*name).to_owned()).collect();
        let usage = of_it.map(|(_, _, usage)| *usage).next().unwrap();
        let wanted = Wanted { names: &names, usage, validity: validity(600) };
        let pair = sign(&earlier, wanted).unwrap();
        let values =
            [("tls.crt", &*pair.certificate), ("tls.key", &*pair.key), ("ca.crt", &bundle)];
        put(path, &values);
    }
    let mut map = objects.at(AGENTS);
    let published = if stage == Stage::Added { &earlier.certificate } else { &bundle };
    map["data"]["ca.crt"] = json!(published);
    objects.put(AGENTS, map);
    [earlier, later]
}

#[tokio::test]
async fn a_change_that_the_version_before_began_is_read_while_each_client_trusts_each_server() {
    for stage in [Stage::Added, Stage::Switched] {
        let objects = installed();
        let [earlier, later] = change_begun(&objects, stage);
        let mut kept = objects.at(CA)["data"].clone();
        kept.as_object_mut().unwrap().retain(|key, _| !key.starts_with("next."));
        let section = "{ make: true, certificate_seconds: 600 }";
        let (mut leader, mut other) =
            (Replica::new(&objects, section), Replica::new(&objects, section));
        // kube-scheduler, which is not started again.
        let running = objects.at(AGENTS)["data"]["ca.crt"].as_str().unwrap().to_owned();
        // Clients and servers with what there was 45 s ago.
        let mut before = vec![(running.clone(), value(&objects, EXTENDER, "tls.crt"))];
        for now in (15..2_900_u64).step_by(15) {
            leader.at(now);
            other.at(now);
            leader.pass().await.unwrap();
            other.keeper.pass(Role::Reads).await.unwrap();
            let now = START + now;
            check(&objects, now);
            let bundle = objects.at(AGENTS)["data"]["ca.crt"].as_str().unwrap().to_owned();
            before.push((bundle, leader.file("tls.crt")));
            let late = &before[before.len().saturating_sub(4)..];
            // Most are alike.
            let trusted: BTreeSet<&String> =
                late.iter().map(|(bundle, _)| bundle).chain([&running]).collect();
            let served: BTreeSet<&String> =
                late.iter().map(|(_, certificate)| certificate).collect();
            for trusted in trusted {
                for certificate in &served {
                    let extender = ("gpupack-extender", Usage::Both);
                    assert!(accepts(trusted, certificate, extender, now), "{stage:?} {now}");
                }
            }
            leader.serves();
            other.serves();
        }
        assert_eq!(objects.at(CA)["data"], kept, "{stage:?}: no key of a CA that does not sign");
        let signer = if stage == Stage::Added { &earlier } else { &later };
        let certificate = value(&objects, WEBHOOK, "tls.crt");
        let webhook = ("gpupack-webhook.gpu-system.svc", Usage::Server);
        assert!(accepts(&signer.certificate, &certificate, webhook, START + 2_890), "{stage:?}");
        leader.at(3_000);
        match (stage, leader.pass().await) {
            (Stage::Added, ended) => assert!(matches!(ended, Err(KeepError::Ended))),
            (Stage::Switched, passed) => {
                passed.unwrap();
                assert_eq!(objects.at(AGENTS)["data"]["ca.crt"], later.certificate, "it ended");
            }
        }
    }
}

#[tokio::test]
async fn the_ca_of_others_is_published_where_that_is_wanted() {
    for (section, has_bundles) in [("{}", false), ("{ publish_ca_bundles: true }", true)] {
        let objects = installed();
        let mut replica = Replica::new(&objects, section);
        assert!(matches!(replica.pass().await, Err(KeepError::Read { .. })));
        let validity = Validity { starts: UnixTime(START), ends: UnixTime(START + 86_400) };
        let ca = make_ca("of others", validity).unwrap();
        let names = ["gpupack-extender".to_owned()];
        let own = sign(&ca, Wanted { names: &names, usage: Usage::Both, validity }).unwrap();
        let write = |name: &str, text: &str| {
            std::fs::write(Path::new(replica.folder.path()).join(name), text).unwrap();
        };
        write("ca.crt", &format!("# from elsewhere\n{}", ca.certificate));
        write("tls.crt", &own.certificate);
        let report = replica.pass().await.unwrap();
        assert_eq!(report.ca_ends, Some(validity.ends));
        assert_eq!(objects.at(AGENTS)["data"]["ca.crt"], ca.certificate);
        let service = bundle_of(&objects.at(SERVICE)["spec"]["caBundle"]);
        assert_eq!(service == ca.certificate, has_bundles);
        let mut all = objects.writes();
        all.sort();
        let expected = if has_bundles { 3 } else { 1 };
        assert_eq!(all.len(), expected, "{all:?}");
        replica.pass().await.unwrap();
        assert_eq!(objects.writes().len(), expected, "nothing is due");
        assert!(objects.at(CA)["data"].is_null(), "no Secret is changed");
    }
}

#[tokio::test]
async fn all_of_a_long_file_of_cas_is_published_or_the_file_is_refused() {
    let objects = installed();
    let mut replica = Replica::new(&objects, "{ publish_ca_bundles: true }");
    let validity = Validity { starts: UnixTime(START), ends: UnixTime(START + 86_400) };
    let ca = |at: usize| make_ca(&format!("CA {at}"), validity).unwrap();
    let cas: Vec<_> = (0..60).map(ca).collect();
    let names = ["gpupack-extender".to_owned()];
    let last = cas.last().unwrap();
    let own = sign(last, Wanted { names: &names, usage: Usage::Both, validity }).unwrap();
    let bundle: String = cas.iter().map(|ca| ca.certificate.as_str()).collect();
    let folder = replica.folder.path().to_owned();
    std::fs::write(folder.join("ca.crt"), &bundle).unwrap();
    std::fs::write(folder.join("tls.crt"), &own.certificate).unwrap();
    replica.pass().await.unwrap();
    assert_eq!(objects.at(AGENTS)["data"]["ca.crt"], bundle, "with the last one, which signs");
    std::fs::write(folder.join("ca.crt"), bundle.repeat(4)).unwrap();
    let refused = replica.pass().await.unwrap_err().to_string();
    assert!(refused.contains("`ca.crt` is longer than 65536 bytes"), "{refused}");
    assert_eq!(objects.at(AGENTS)["data"]["ca.crt"], bundle, "and what is published stays");
}
