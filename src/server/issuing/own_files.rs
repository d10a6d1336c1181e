//! The files from which this process serves, in a folder of its own.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::issuing::pair::Pair;
use kube_api::config::identity::TlsConfig;

/// A file that cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write `{}`: {fault}", path.display())]
pub struct FileError {
    path: PathBuf,
    fault: io::Error,
}

/// Writes the bundle, the key and the certificate, each whole or not at all; only this process may read
/// the key. A reader between two of them sees a pair that does not fit, and keeps the last one.
///
/// # Errors
/// The first file that cannot be written.
pub fn write(tls: &TlsConfig, bundle: &str, own: &Pair) -> Result<(), FileError> {
    for (path, text) in [
        (&tls.ca_file, bundle),
        (&tls.key_file, &own.key),
        (&tls.certificate_file, &own.certificate),
    ] {
        replace(path, text.as_bytes()).map_err(|fault| FileError { path: path.clone(), fault })?;
    }
    Ok(())
}

fn replace(path: &Path, text: &[u8]) -> io::Result<()> {
    if fs::read(path).is_ok_and(|found| found == text) {
        return Ok(());
    }
    let mut beside = path.as_os_str().to_owned();
    beside.push(".tmp");
    let beside = PathBuf::from(beside);
    match fs::remove_file(&beside) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&beside)?;
    let written = file.write_all(text).and_then(|()| fs::rename(&beside, path));
    if written.is_err() {
        drop(fs::remove_file(&beside)); // the first error is the one to report
    }
    written
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn files_are_replaced_whole_and_only_their_owner_may_read_them() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        let tls = TlsConfig {
            certificate_file: file("tls.crt"),
            key_file: file("tls.key"),
            ca_file: file("ca.crt"),
        };
        let pair = |text: &str| Pair { certificate: format!("c{text}"), key: format!("k{text}") };
        fs::write(file("tls.key.tmp"), "left by a crash").unwrap();
        for text in ["1", "2", "2"] {
            write(&tls, &format!("b{text}"), &pair(text)).unwrap();
            let read = |name: &str| fs::read_to_string(file(name)).unwrap();
            assert_eq!(
                read("tls.crt") + &read("tls.key") + &read("ca.crt"),
                format!("c{text}k{text}b{text}")
            );
        }
        let mode = fs::metadata(file("tls.key")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3, "nothing is left beside them");
        let nowhere = TlsConfig { key_file: file("no/where"), ..tls };
        assert!(write(&nowhere, "b", &pair("3")).unwrap_err().to_string().contains("no/where"));
    }
}
