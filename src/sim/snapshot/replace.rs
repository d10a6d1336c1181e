//! Writes files whole or not at all.
//!
//! Each text is written beside its file first. The files are replaced only when all texts are
//! written, so a reader never sees half of one, and a full disk leaves the old files.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::{fs, io, process};

/// A file that could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write `{}`", path.display())]
pub struct ReplaceError {
    pub path: PathBuf,
    pub source: io::Error,
}

impl ReplaceError {
    fn of(path: &Path, source: io::Error) -> Self {
        Self { path: path.to_owned(), source }
    }
}

/// Writes each text into its file, replacing what is there.
///
/// # Errors
/// [`ReplaceError`] for the first file that cannot be written. No file has changed then, unless the
/// system fails between the renames at the end.
pub fn replace(files: &[(&Path, &[u8])]) -> Result<(), ReplaceError> {
    let mut written = Vec::new();
    let replaced = write_beside(files, &mut written).and_then(|()| put_in_place(files, &written));
    if replaced.is_err() {
        // To remove a leftover may fail as well; the first error is the one to report.
        written.iter().for_each(|beside| drop(fs::remove_file(beside)));
    }
    replaced
}

fn write_beside(files: &[(&Path, &[u8])], written: &mut Vec<PathBuf>) -> Result<(), ReplaceError> {
    for (path, text) in files {
        if path.is_dir() {
            return Err(ReplaceError::of(path, io::ErrorKind::IsADirectory.into()));
        }
        let mut beside = path.file_name().map(OsString::from).unwrap_or_default();
        beside.push(format!(".{}.{}.tmp", process::id(), written.len()));
        let beside = path.with_file_name(beside);
        written.push(beside.clone());
        fs::write(&beside, text).map_err(|source| ReplaceError::of(path, source))?;
    }
    Ok(())
}

fn put_in_place(files: &[(&Path, &[u8])], written: &[PathBuf]) -> Result<(), ReplaceError> {
    for ((path, _), beside) in files.iter().zip(written) {
        fs::rename(beside, path).map_err(|source| ReplaceError::of(path, source))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn either_all_files_are_new_or_all_are_old() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        replace(&[(&file("a"), b"1"), (&file("b"), b"2")]).unwrap();
        for bad in [file("nowhere/c"), folder.path().to_owned(), file("..")] {
            let refused = replace(&[(&file("a"), b"3"), (&bad, b"4")]).unwrap_err();
            assert_eq!(refused.path, bad);
            assert_eq!(fs::read(file("a")).unwrap(), b"1", "{}", bad.display());
        }
        replace(&[(&file("b"), b"5")]).unwrap();
        assert_eq!(fs::read(file("b")).unwrap(), b"5");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "nothing is left beside them");
    }
}
