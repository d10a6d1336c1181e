//! The certificate that a pod serves, as its clients see it: for users who may forward a port of the pod, and
//! may not read its Secret.

use std::sync::Arc;
use std::time::Duration;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::ring::default_provider;
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use tokio_rustls::TlsConnector;

use crate::base::reader::Reader;

/// Longest handshake, with the way to it.
const WITHIN: Duration = Duration::from_secs(10);

/// A port of a pod.
pub(crate) struct Door<'a> {
    pub(crate) namespace: &'a str,
    pub(crate) pod: &'a str,
    pub(crate) port: u16,
    /// The name by which its clients call it.
    pub(crate) called: &'a str,
}

/// The chain that a pod shows, the own certificate first. Nothing of it is checked but that the pod has its
/// key, and nothing is sent after the handshake.
pub(crate) async fn chain(
    reader: &Reader,
    door: &Door<'_>,
) -> Result<Vec<CertificateDer<'static>>, String> {
    let talk = async {
        let stream = reader.forwarded(door.namespace, door.pod, door.port).await?;
        let name = ServerName::try_from(door.called.to_owned())
            .map_err(|_| "it is called by no name of a server".to_owned())?;
        let provider = Arc::new(default_provider());
        let any = Arc::new(AnyServer(provider.signature_verification_algorithms));
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?
            .dangerous()
            .with_custom_certificate_verifier(any)
            .with_no_client_auth();
        let talk = TlsConnector::from(Arc::new(config)).connect(name, stream).await;
        let talk = talk.map_err(|error| format!("no TLS handshake: {error}"))?;
        let shown = talk.get_ref().1.peer_certificates().unwrap_or_default();
        Ok(shown.iter().map(|der| der.clone().into_owned()).collect())
    };
    let answer = tokio::time::timeout(WITHIN, talk).await;
    answer.unwrap_or_else(|_| Err(format!("no TLS handshake within {} s", WITHIN.as_secs())))
}

/// Lets a server show any certificate, of which it has the key: it is judged afterwards.
#[derive(Debug)]
struct AnyServer(WebPkiSupportedAlgorithms);

impl ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
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
