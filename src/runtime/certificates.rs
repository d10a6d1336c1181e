//! Certificates in files, read again when the files change: that of this process, and that of the CA
//! of those with which it talks.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::ring::default_provider as provider;
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::WantsServerCert;
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    ClientConfig, ConfigBuilder, DigitallySignedStruct, DistinguishedName, RootCertStore,
    ServerConfig, SignatureScheme, WantsVerifier,
};
use tokio::sync::watch;

/// A name in the certificates of all replicas of the extender.
pub const REPLICA_NAME: &str = "gpupack-extender";

/// How often files are read again. kubelet writes a changed Secret within a minute or two, and
/// certificates are renewed days before they end.
pub const READ_EVERY: Duration = Duration::from_secs(10);

/// Why a certificate cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// A file cannot be read.
    #[error("cannot read `{}`: {fault}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        fault: io::Error,
    },
    /// Not PEM, or PEM without the expected item.
    #[error("`{}` holds no {kind} in PEM: {fault}", path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// The expected item.
        kind: &'static str,
        /// The error of the PEM reader.
        fault: rustls::pki_types::pem::Error,
    },
    /// Certificate and key do not match, or are of an unknown kind.
    #[error("certificate and key cannot be used together: {0}")]
    Pair(#[from] rustls::Error),
    /// The certificate of the CA cannot be used.
    #[error("`{}` is no certificate of a CA: {fault}", path.display())]
    Ca {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        fault: String,
    },
}

impl CertificateError {
    fn of_ca(path: &Path, fault: String) -> Self {
        Self::Ca { path: path.to_owned(), fault }
    }
}

/// The files, and how often they are checked for changes.
#[derive(Clone, Debug)]
pub struct CertificateFiles {
    /// Certificate chain in PEM, the own one first, and its private key. A client may have none.
    pub own: Option<(PathBuf, PathBuf)>,
    /// Certificates in PEM of the CA whose servers and clients are trusted.
    pub ca: Option<PathBuf>,
    /// How often all are read again.
    pub read_every: Duration,
}

/// The files as read.
#[derive(PartialEq, Eq)]
struct Contents {
    own: Option<(Vec<u8>, Vec<u8>)>,
    ca: Option<Vec<u8>>,
}

type Chain = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);
type Trusted = (Arc<RootCertStore>, ClientCheck);

/// Which certificates a listener wants of its clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientCertificate {
    /// None.
    None,
    /// Any, of which the client has the key. Whose it is must be checked with each request.
    Requested,
    /// One of the CA.
    Required,
}

/// How connections are made with the contents of the files.
#[derive(Debug, Default)]
pub struct Tls {
    /// For listeners whose clients show no certificate.
    server: Option<Arc<ServerConfig>>,
    /// For listeners whose clients may show any.
    requesting: Option<Arc<ServerConfig>>,
    /// For listeners whose clients must show one of the CA.
    mutual: Option<Arc<ServerConfig>>,
    /// For calls of servers of the CA.
    client: Option<Arc<ClientConfig>>,
    /// What checks the certificates of clients of the CA.
    clients: Option<ClientCheck>,
}

impl Tls {
    /// For a listener.
    pub fn server(&self, wanted: ClientCertificate) -> Option<&Arc<ServerConfig>> {
        match wanted {
            ClientCertificate::None => self.server.as_ref(),
            ClientCertificate::Requested => self.requesting.as_ref(),
            ClientCertificate::Required => self.mutual.as_ref(),
        }
    }

    /// Whether a client with this chain has a certificate of the CA with this name.
    pub fn accepts(&self, chain: &[CertificateDer<'static>], name: &ServerName<'static>) -> bool {
        self.clients.as_ref().is_some_and(|clients| clients.accepts(chain))
            && chain.first().is_some_and(|first| is_named(first, name))
    }

    /// With this configuration of a listener.
    #[cfg(any(test, feature = "test-support"))]
    pub fn of_server(config: ServerConfig) -> Self {
        Self { server: Some(Arc::new(config)), ..Self::default() }
    }

    /// For calls.
    pub(crate) fn client(&self) -> Option<&Arc<ClientConfig>> {
        self.client.as_ref()
    }
}

fn read_file(path: &Path) -> Result<Vec<u8>, CertificateError> {
    std::fs::read(path).map_err(|fault| CertificateError::File { path: path.to_owned(), fault })
}

impl CertificateFiles {
    fn read(&self) -> Result<Contents, CertificateError> {
        let own = match &self.own {
            Some((certificate, key)) => Some((read_file(certificate)?, read_file(key)?)),
            None => None,
        };
        Ok(Contents { own, ca: self.ca.as_deref().map(read_file).transpose()? })
    }

    fn chain(&self, contents: &Contents) -> Result<Option<Chain>, CertificateError> {
        let Some(((certificate, key), (chain, secret))) =
            self.own.as_ref().zip(contents.own.as_ref())
        else {
            return Ok(None);
        };
        let chain = certificates(certificate, chain)?;
        let secret = PrivateKeyDer::from_pem_slice(secret).map_err(|fault| {
            CertificateError::Pem { path: key.clone(), kind: "private key", fault }
        })?;
        Ok(Some((chain, secret)))
    }

    /// The certificates of the CA, and what checks those of clients with them.
    fn trusted(&self, contents: &Contents) -> Result<Option<Trusted>, CertificateError> {
        let Some((path, ca)) = self.ca.as_ref().zip(contents.ca.as_ref()) else { return Ok(None) };
        let mut roots = RootCertStore::empty();
        for certificate in certificates(path, ca)? {
            roots
                .add(certificate)
                .map_err(|error| CertificateError::of_ca(path, error.to_string()))?;
        }
        let roots = Arc::new(roots);
        let clients = ClientCheck::of_roots(&roots);
        let clients = clients.map_err(|fault| CertificateError::of_ca(path, fault))?;
        Ok(Some((roots, clients)))
    }

    fn checked(&self, contents: &Contents) -> Result<Arc<Tls>, CertificateError> {
        let (chain, trusted) = (self.chain(contents)?, self.trusted(contents)?);
        let mut tls = Tls::default();
        if let Some(chain) = &chain {
            tls.server = Some(with_chain(server_builder()?.with_no_client_auth(), chain)?);
            let any_client = Arc::new(AnyClient(provider().signature_verification_algorithms));
            let builder = server_builder()?.with_client_cert_verifier(any_client);
            tls.requesting = Some(with_chain(builder, chain)?);
            if let Some((_, ClientCheck(clients))) = &trusted {
                let builder = server_builder()?.with_client_cert_verifier(Arc::clone(clients));
                tls.mutual = Some(with_chain(builder, chain)?);
            }
        }
        if let Some((roots, clients)) = trusted {
            tls.clients = Some(clients);
            let client = ClientConfig::builder_with_provider(Arc::new(provider()))
                .with_safe_default_protocol_versions()?
                .with_root_certificates(roots);
            tls.client = Some(Arc::new(match chain {
                Some((chain, key)) => client.with_client_auth_cert(chain, key)?,
                None => client.with_no_client_auth(),
            }));
        }
        Ok(Arc::new(tls))
    }
}

fn server_builder() -> Result<ConfigBuilder<ServerConfig, WantsVerifier>, rustls::Error> {
    ServerConfig::builder_with_provider(Arc::new(provider())).with_safe_default_protocol_versions()
}

fn with_chain(
    builder: ConfigBuilder<ServerConfig, WantsServerCert>,
    (chain, key): &Chain,
) -> Result<Arc<ServerConfig>, rustls::Error> {
    builder.with_single_cert(chain.clone(), key.clone_key()).map(Arc::new)
}

fn certificates(
    path: &Path,
    text: &[u8],
) -> Result<Vec<CertificateDer<'static>>, CertificateError> {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text).collect();
    let fault = match chain {
        Ok(chain) if !chain.is_empty() => return Ok(chain),
        Ok(_) => rustls::pki_types::pem::Error::NoItemsFound,
        Err(fault) => fault,
    };
    Err(CertificateError::Pem { path: path.to_owned(), kind: "certificate", fault })
}

/// What checks the certificates of clients of one CA.
#[derive(Clone, Debug)]
pub struct ClientCheck(Arc<dyn ClientCertVerifier>);

impl ClientCheck {
    /// Of the CA with these certificates in PEM.
    ///
    /// # Errors
    /// What cannot be read.
    pub fn of_ca(pem: &[u8]) -> Result<Self, String> {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(pem) {
            let certificate = certificate.map_err(|error| error.to_string())?;
            roots.add(certificate).map_err(|error| error.to_string())?;
        }
        Self::of_roots(&Arc::new(roots))
    }

    fn of_roots(roots: &Arc<RootCertStore>) -> Result<Self, String> {
        let builder =
            WebPkiClientVerifier::builder_with_provider(Arc::clone(roots), Arc::new(provider()));
        let clients = builder.build().map_err(|error| error.to_string())?;
        Ok(Self(Arc::new(ShortChains(clients))))
    }

    /// Whether this is the chain of a client of the CA, the own certificate first.
    pub fn accepts(&self, chain: &[CertificateDer<'static>]) -> bool {
        let Some((own, others)) = chain.split_first() else { return false };
        self.0.verify_client_cert(own, others, UnixTime::now()).is_ok()
    }
}

/// Most certificates that a client may show, its own included; those of clusters have one or two. A CA is looked
/// for along every order of them, for each request.
const MOST_SHOWN: usize = 4;

/// Most bytes of them: they are kept as long as the connection.
const MOST_SHOWN_BYTES: usize = 16 << 10;

/// Refuses a client that shows more than that.
fn refuse_long(
    own: &CertificateDer<'_>,
    others: &[CertificateDer<'_>],
) -> Result<(), rustls::Error> {
    let bytes = own.len() + others.iter().map(|other| other.len()).sum::<usize>();
    match others.len() < MOST_SHOWN && bytes <= MOST_SHOWN_BYTES {
        true => Ok(()),
        false => Err(rustls::CertificateError::ApplicationVerificationFailure.into()),
    }
}

/// Checks the length of a chain before anything else.
#[derive(Debug)]
struct ShortChains(Arc<dyn ClientCertVerifier>);

impl ClientCertVerifier for ShortChains {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.0.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        own: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        refuse_long(own, others)?;
        self.0.verify_client_cert(own, others, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

/// Lets clients show any certificate, as `RequestClientCert` of Go does. They prove that they have its
/// key, and nothing else.
#[derive(Debug)]
struct AnyClient(WebPkiSupportedAlgorithms);

impl ClientCertVerifier for AnyClient {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn verify_client_cert(
        &self,
        own: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        refuse_long(own, others)?;
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signature, &self.0)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.0)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_schemes()
    }
}

/// Whether a certificate names this host or client among its alternative names.
pub fn is_named(certificate: &CertificateDer<'_>, name: &ServerName<'_>) -> bool {
    webpki::EndEntityCert::try_from(certificate)
        .is_ok_and(|found| found.verify_is_valid_for_subject_name(name).is_ok())
}

/// How servers prove who they are. Without it addresses are plain.
#[derive(Clone, Debug)]
pub struct ServerProof {
    /// The certificates.
    pub tls: watch::Receiver<Arc<Tls>>,
    /// The name in that of every server.
    pub name: ServerName<'static>,
}

impl ServerProof {
    /// Whether a client with this chain is such a server.
    pub fn accepts(&self, chain: &[CertificateDer<'static>]) -> bool {
        self.tls.borrow().accepts(chain, &self.name)
    }
}

/// Valid certificates, which follow their files.
pub struct Certificates {
    files: CertificateFiles,
    seen: Contents,
    current: watch::Sender<Arc<Tls>>,
}

impl Certificates {
    /// Reads the files for the first time.
    ///
    /// # Errors
    /// [`CertificateError`]: without a certificate nothing is served.
    pub fn read(files: CertificateFiles) -> Result<Self, CertificateError> {
        let seen = files.read()?;
        let current = watch::Sender::new(files.checked(&seen)?);
        Ok(Self { files, seen, current })
    }

    /// The newest valid ones, for new connections.
    pub fn current(&self) -> watch::Receiver<Arc<Tls>> {
        self.current.subscribe()
    }

    /// Reads the files again periodically. Contents that are not valid, for instance because only one
    /// file is written yet, leave the last valid ones in use.
    pub fn follow(self) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            let Self { files, mut seen, current } = self;
            loop {
                tokio::time::sleep(files.read_every).await;
                let contents = match files.read() {
                    Ok(contents) if contents == seen => continue,
                    Ok(contents) => contents,
                    Err(error) => {
                        tracing::warn!(%error, "the old certificate stays in use");
                        continue;
                    }
                };
                match files.checked(&contents) {
                    Ok(checked) => {
                        current.send_replace(checked);
                        tracing::info!("certificates read again");
                    }
                    Err(error) => tracing::warn!(%error, "the old certificate stays in use"),
                }
                seen = contents;
            }
        })
    }
}
