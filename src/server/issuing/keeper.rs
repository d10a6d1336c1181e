//! Keeps the certificates: reads the objects, asks the plan what is due, and carries it out.
//!
//! Each replica has one. Before it opens its ports it makes what is missing; later only the leader writes,
//! and the others take the certificate that they serve from what it wrote.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::Secret;
use rustls::pki_types::CertificateDer;

use crate::issuing::authority::{Authority, BUNDLE, SecretData};
use crate::issuing::checked::{self, CertificateFault, to_pem};
use crate::issuing::faults::{Faults, Pauses};
use crate::issuing::objects::{
    API_SERVICE, CA, CertificateNames, Meaning, Objects, WEBHOOKS, api_service_fields,
    certificate_data, secret_of, usage_of, webhook_fields, with_bundle, with_data, without_next,
};
use crate::issuing::own_files::{self, FileError};
use crate::issuing::pair::{Wanted, sign};
use crate::rotation::plan::{
    BundlePlace, CertificateOwner, RotationStep, SeenBundle, SeenCertificate, UnixTime, Validity,
    WrongClock, steps,
};
use control::metrics::labels::CertificateLabel;
use control::shared::app::App;
use kube_api::config::certificates::CertificatesConfig;
use kube_api::config::file::Config;
use kube_api::config::identity::{SCHEDULER_NAME, TlsConfig};
use kube_api::write::outcome::Cause;
use kube_api::write::trust::{KeptObject, KeptWrite, Merge};
use kube_api::write::writer::ApiWriter;
use runtime::certificates::REPLICA_NAME;
use runtime::clock::Clock;

/// Most rounds of reading and writing in one pass. From empty Secrets it takes three.
const MOST_ROUNDS: usize = 8;

/// What a log line is about that is about no single object.
const WHOLE: &str = "certificates";

/// A certificate begins so long ago, for clocks that are late.
const EARLIER: Duration = Duration::from_secs(3_600);

/// Why certificates cannot be kept now.
#[derive(Debug, thiserror::Error)]
pub enum KeepError {
    /// A Secret without which nothing is served is missing.
    #[error(
        "there is no Secret `{namespace}/{name}`: create it empty, see docs/operations.md#certificates"
    )]
    Missing { namespace: String, name: &'static str },
    /// An object cannot be read.
    #[error("cannot read `{name}`: {cause}")]
    Unread { name: &'static str, cause: Cause },
    /// An object cannot be written.
    #[error("cannot write `{name}`: {cause}")]
    Unwritten { name: &'static str, cause: Cause },
    /// Other clients change what was read, each time before it is written.
    #[error("other clients change the same objects all the time")]
    Contended,
    /// A certificate cannot be made.
    #[error("cannot make a certificate: {0}")]
    Make(#[from] rcgen::Error),
    /// The clock of this machine, or that of an earlier one, is wrong.
    #[error(
        "the CA begins in the future: the clock of this machine is late, or a machine whose clock was ahead \
         made the CA; then empty the Secret `gpupack-ca`, and another one is made"
    )]
    Clock,
    /// The CA is to be replaced.
    #[error("the CA has ended: replace it, see docs/install.md#replace-the-ca")]
    Ended,
    /// The clock of this machine or of the API server is wrong.
    #[error(
        "the clock of this machine is {} {} that of the API server: no certificate is made or renewed until \
         they agree to ten minutes",
        .0.by, .0.side
    )]
    Clocks(WrongClock),
    /// There is no certificate yet.
    #[error("the certificate of the extender is not made yet")]
    NoCertificate,
    /// A file of `tls` cannot be read.
    #[error("cannot read `{}`: {fault}", path.display())]
    Read {
        path: PathBuf,
        /// The error of the operating system.
        fault: io::Error,
    },
    /// A file of `tls` has no certificates that can be used.
    #[error("a file of `tls`: {0}")]
    Ca(#[from] CertificateFault),
    /// A file of `tls` cannot be written.
    #[error(transparent)]
    Write(#[from] FileError),
}

/// Whether a replica writes to the API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It leads, or starts: it makes what is due.
    Writes,
    /// It reads, and serves what the leader wrote.
    Reads,
}

/// The certificates after a pass.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CertificateReport {
    /// When the CA that signs ends.
    pub ca_ends: Option<UnixTime>,
    pub ends: BTreeMap<CertificateOwner, UnixTime>,
}

/// Keeps the certificates until the process ends. Only the leader writes.
pub fn keeping(app: Arc<App>, keeper: Option<Keeper>) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let Some(mut keeper) = keeper else { return std::future::pending().await };
        loop {
            let is_leader = app.lead.leading.is_here() && !app.lead.is_stopping();
            let role = if is_leader { Role::Writes } else { Role::Reads };
            if let Ok(report) = keeper.pass(role).await {
                app.metrics.set_certificates(times(&report));
            }
            tokio::time::sleep(keeper.pause()).await;
        }
    })
}

/// When each ends, in seconds since 1970; 0: not known, or none.
fn times(report: &CertificateReport) -> [(CertificateLabel, u64); 4] {
    let end_seconds = |owner| report.ends.get(&owner).map_or(0, |end| end.0);
    [
        (CertificateLabel::Ca, report.ca_ends.map_or(0, |end| end.0)),
        (CertificateLabel::Extender, end_seconds(CertificateOwner::Extender)),
        (CertificateLabel::Scheduler, end_seconds(CertificateOwner::Scheduler)),
        (CertificateLabel::Webhook, end_seconds(CertificateOwner::Webhook)),
    ]
}

/// Keeps the certificates of one installation.
pub struct Keeper {
    writer: ApiWriter,
    clock: Clock,
    namespace: String,
    agents_namespace: String,
    tls: TlsConfig,
    settings: CertificatesConfig,
    names: CertificateNames,
    /// What is wrong, so that no line about it is repeated.
    faults: Faults,
    pauses: Pauses,
    /// Whether the files of `tls` are written.
    has_files: bool,
}

impl Keeper {
    /// Of an extender with this configuration; `None` without `certificates`.
    pub fn new(config: &Config, writer: ApiWriter, clock: Clock) -> Option<Self> {
        let (settings, tls) = config.certificates.clone().zip(config.tls.clone())?;
        let namespace = config.lease.namespace.clone();
        Some(Self {
            writer,
            clock,
            names: names(&settings, &namespace),
            namespace,
            agents_namespace: config.agents.namespace.clone(),
            tls,
            settings,
            faults: Faults::default(),
            pauses: Pauses::default(),
            has_files: false,
        })
    }

    /// Makes what is missing, and writes the files from which this process serves. It tries until that is
    /// done; what else cannot be written is for later. Where others make the certificates, there is nothing
    /// to wait for.
    pub fn start(&mut self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            while self.settings.make {
                // What is wrong is in the log.
                let _report = self.pass(Role::Writes).await;
                if self.has_files {
                    return;
                }
                tokio::time::sleep(self.pause()).await;
            }
        })
    }

    /// Pause before the next pass: after failures a growing one, but none longer than between two that succeed.
    pub fn pause(&self) -> Duration {
        let usual = self.settings.look_every();
        self.pauses.after_failure().map_or(usual, |pause| pause.min(usual))
    }

    /// Does what is due, and logs what is wrong.
    ///
    /// # Errors
    /// [`KeepError`]: the next pass goes on.
    pub async fn pass(&mut self, role: Role) -> Result<CertificateReport, KeepError> {
        let report = match self.settings.make {
            true => self.keep(role).await,
            false => self.publish_file(role).await,
        };
        match &report {
            Ok(_) => {
                self.pauses.reset();
                self.note(WHOLE, Vec::new());
            }
            Err(error) => {
                self.pauses.grow();
                self.note(WHOLE, vec![error.to_string()]);
            }
        }
        report
    }

    /// Logs what is wrong with one thing, each line when it begins: nothing, if it is well.
    fn note(&mut self, about: &'static str, found: Vec<String>) {
        for line in self.faults.note(about, found) {
            tracing::warn!(about, "{line}");
        }
    }

    async fn keep(&mut self, role: Role) -> Result<CertificateReport, KeepError> {
        let mut failed = None;
        for _ in 0..MOST_ROUNDS {
            let objects = self.read(role).await?;
            let now = UnixTime(self.clock.unix_seconds());
            let found =
                Authority::read(objects.ca.data.as_ref().unwrap_or(&SecretData::new()), now);
            self.note(CA, found.as_ref().err().map(ToString::to_string).into_iter().collect());
            let ca = found.ok().flatten();
            let Meaning { seen, own, faults } = objects.meaning(ca.as_ref(), &self.names, now);
            for name in objects.certificates.keys().map(|owner| secret_of(*owner)) {
                let own = faults.iter().filter(|(about, _)| *about == name);
                self.note(name, own.map(|(_, fault)| fault.clone()).collect());
            }
            let wrong = objects.read_at.and_then(|at| WrongClock::found(now, at));
            if let Some(ca) = seen.ca.filter(|ca| !ca.contains(now)) {
                let fault = if ca.starts > now { KeepError::Clock } else { KeepError::Ended };
                return Err(wrong.map_or(fault, KeepError::Clocks));
            }
            let due = match role {
                Role::Writes => steps(&seen, self.settings.certificate, now),
                Role::Reads => Vec::new(),
            };
            if let Some(wrong) = wrong.filter(|_| own.is_none() || !due.is_empty()) {
                failed = Some(KeepError::Clocks(wrong)); // what is there is served
            }
            if due.is_empty() || failed.is_some() {
                let Some((ca, own)) = ca.zip(own) else {
                    return Err(failed.unwrap_or(KeepError::NoCertificate));
                };
                own_files::write(&self.tls, &ca.bundle(), &own)?;
                self.has_files = true;
                let ends = seen.certificates.iter().filter_map(|(owner, found)| match found {
                    SeenCertificate::Made { ends, .. } => Some((*owner, *ends)),
                    SeenCertificate::NoSecret | SeenCertificate::Unusable => None,
                });
                let report = CertificateReport {
                    ca_ends: Some(ca.signer.validity.ends),
                    ends: ends.collect(),
                };
                return failed.map_or(Ok(report), Err);
            }
            for step in due {
                let written = self.carry_out(step, &objects, ca.as_ref(), now).await?;
                match written {
                    (name, KeptWrite::Done) => tracing::info!(?step, name, "certificates"),
                    (_, KeptWrite::Changed) => {} // read again what another one wrote
                    (name, KeptWrite::Failed(cause)) => {
                        failed = Some(KeepError::Unwritten { name, cause });
                    }
                }
            }
        }
        Err(failed.unwrap_or(KeepError::Contended))
    }

    /// Reads all objects, the CA last: what is written with it never takes back what another one wrote.
    async fn read(&mut self, role: Role) -> Result<Objects, KeepError> {
        let mut objects = Objects::default();
        for owner in CertificateOwner::ALL {
            let name = secret_of(owner);
            match self.one::<Secret>(&self.namespace, name).await.map(|(found, _)| found) {
                Ok(Some(secret)) => drop(objects.certificates.insert(owner, secret)),
                Ok(None) if owner == CertificateOwner::Extender => return Err(self.missing(name)),
                Ok(None) => self.note(name, vec![format!("there is no Secret `{name}`")]),
                Err(error) if owner == CertificateOwner::Extender => return Err(error),
                Err(error) => self.note(name, vec![error.to_string()]),
            }
        }
        if role == Role::Writes {
            self.read_places(&mut objects).await;
        }
        let (ca, read_at) = self.one(&self.namespace, CA).await?;
        objects.ca = ca.ok_or_else(|| self.missing(CA))?;
        objects.read_at = read_at.map(UnixTime);
        Ok(objects)
    }

    async fn read_places(&mut self, objects: &mut Objects) {
        let namespace = self.agents_namespace.clone();
        objects.agents = self.optional(&namespace, CA, "ConfigMap").await;
        if self.settings.make || self.settings.publish_ca_bundles {
            objects.webhooks = self.optional("", WEBHOOKS, "MutatingWebhookConfiguration").await;
            objects.api_service = self.optional("", API_SERVICE, "APIService").await;
        }
    }

    /// An object, and when that was by the clock of the API server.
    async fn one<T: KeptObject>(
        &self,
        namespace: &str,
        name: &'static str,
    ) -> Result<(Option<T>, Option<u64>), KeepError> {
        let read = self.writer.read_kept(namespace, name).await;
        read.map_err(|cause| KeepError::Unread { name, cause })
    }

    /// An object that may be missing.
    async fn optional<T: KeptObject>(
        &mut self,
        namespace: &str,
        name: &'static str,
        kind: &'static str,
    ) -> Option<T> {
        let (found, fault) = match self.one(namespace, name).await.map(|(found, _)| found) {
            Ok(None) => (None, Some(format!("there is no {kind} `{name}`: it gets no CA"))),
            Ok(found) => (found, None),
            Err(error) => (None, Some(format!("{kind}: {error}"))),
        };
        self.note(kind, fault.into_iter().collect());
        found
    }

    fn missing(&self, name: &'static str) -> KeepError {
        KeepError::Missing { namespace: self.namespace.clone(), name }
    }

    /// One write, and the object that it is about.
    async fn carry_out(
        &self,
        step: RotationStep,
        objects: &Objects,
        ca: Option<&Authority>,
        now: UnixTime,
    ) -> Result<(&'static str, KeptWrite), KeepError> {
        match (step, ca) {
            (RotationStep::Sign(owner, ends), Some(ca)) => {
                let names = self.names.get(&owner).map_or(&[][..], Vec::as_slice);
                let validity = Validity { starts: now.minus(EARLIER), ends };
                let wanted = Wanted { names, usage: usage_of(owner), validity };
                let data = certificate_data(sign(&ca.signer.pair, wanted)?, &ca.bundle());
                Ok(self.write_secret(objects, owner, data).await)
            }
            (RotationStep::AddBundle(owner), Some(ca)) => {
                let bundle = k8s_openapi::ByteString(ca.bundle().into());
                let data = SecretData::from([(BUNDLE.to_owned(), bundle)]);
                Ok(self.write_secret(objects, owner, data).await)
            }
            (RotationStep::Publish(place), Some(ca)) => {
                Ok(self.publish(objects, place, &ca.bundle()).await)
            }
            (RotationStep::ForgetNextCa, Some(_)) => {
                Ok((CA, self.writer.replace_kept(&without_next(&objects.ca)).await))
            }
            (RotationStep::MakeCa, _) | (_, None) => {
                let secret = with_data(&objects.ca, Authority::make(now)?.data());
                Ok((CA, self.writer.replace_kept(&secret).await))
            }
        }
    }

    async fn write_secret(
        &self,
        objects: &Objects,
        owner: CertificateOwner,
        data: SecretData,
    ) -> (&'static str, KeptWrite) {
        let written = match objects.certificates.get(&owner) {
            Some(secret) => self.writer.replace_kept(&with_data(secret, data)).await,
            None => KeptWrite::Changed,
        };
        (secret_of(owner), written)
    }

    async fn publish(
        &self,
        objects: &Objects,
        place: BundlePlace,
        bundle: &str,
    ) -> (&'static str, KeptWrite) {
        match place {
            BundlePlace::Agents => {
                let written = match &objects.agents {
                    Some(map) => self.writer.replace_kept(&with_bundle(map, bundle)).await,
                    None => KeptWrite::Changed,
                };
                ("ConfigMap", written)
            }
            BundlePlace::Webhooks => {
                let written = match &objects.webhooks {
                    Some(all) => {
                        let fields = webhook_fields(all, bundle);
                        self.writer.patch_kept(all, fields, Merge::ByName).await
                    }
                    None => KeptWrite::Changed,
                };
                ("MutatingWebhookConfiguration", written)
            }
            BundlePlace::ApiService => {
                let written = match &objects.api_service {
                    Some(service) => {
                        let fields = api_service_fields(bundle);
                        self.writer.patch_kept(service, fields, Merge::Plain).await
                    }
                    None => KeptWrite::Changed,
                };
                ("APIService", written)
            }
        }
    }

    /// Publishes the CA of `tls`, which others made.
    async fn publish_file(&mut self, role: Role) -> Result<CertificateReport, KeepError> {
        let (ca, own) = (read(&self.tls.ca_file)?, read(&self.tls.certificate_file)?);
        let all = checked::many("ca.crt", &ca)?;
        let chain = checked::many("tls.crt", &own)?;
        let own = chain.first().and_then(end_of);
        let report = CertificateReport {
            ca_ends: all.iter().filter_map(end_of).min(),
            ends: own.map(|ends| (CertificateOwner::Extender, ends)).into_iter().collect(),
        };
        if role == Role::Reads || all.is_empty() {
            return Ok(report);
        }
        let bundle: String = all.iter().map(to_pem).collect();
        let mut objects = Objects::default();
        self.read_places(&mut objects).await;
        for place in BundlePlace::ALL {
            if objects.bundle(place, &bundle) == SeenBundle::Outdated {
                match self.publish(&objects, place, &bundle).await {
                    (name, KeptWrite::Done) => tracing::info!(name, "the CA is published"),
                    (_, KeptWrite::Changed) => {} // the next pass
                    (name, KeptWrite::Failed(cause)) => {
                        return Err(KeepError::Unwritten { name, cause });
                    }
                }
            }
        }
        Ok(report)
    }
}

fn read(path: &Path) -> Result<Vec<u8>, KeepError> {
    std::fs::read(path).map_err(|fault| KeepError::Read { path: path.to_owned(), fault })
}

/// When a certificate ends.
fn end_of(der: &CertificateDer<'_>) -> Option<UnixTime> {
    checked::validity(der).map(|validity| validity.ends)
}

/// The names in the certificate of each owner.
fn names(settings: &CertificatesConfig, namespace: &str) -> CertificateNames {
    let mut extender = vec![REPLICA_NAME.to_owned(), "gpupack".to_owned()];
    for end in ["", ".svc", ".svc.cluster.local"] {
        extender.push(format!("gpupack.{namespace}{end}"));
    }
    extender.extend(settings.names.iter().cloned());
    let mut unique: Vec<String> = Vec::new();
    for name in extender {
        if !unique.contains(&name) {
            unique.push(name);
        }
    }
    let webhook = [".svc", ".svc.cluster.local"];
    let webhook = webhook.map(|end| format!("gpupack-webhook.{namespace}{end}"));
    CertificateNames::from([
        (CertificateOwner::Extender, unique),
        (CertificateOwner::Scheduler, vec![SCHEDULER_NAME.to_owned()]),
        (CertificateOwner::Webhook, webhook.into()),
    ])
}
