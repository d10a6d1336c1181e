//! Opens NVIDIA's library.

use std::ffi::OsStr;
use std::path::Path;

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

use crate::gpu::sample::ProbeError;
use crate::nvml::trouble::library_error;

/// The library by default; the loader's search path applies.
pub(crate) const LIBRARY: &str = "libnvidia-ml.so.1";

/// Opens the library. A second time in one process only counts.
///
/// # Errors
/// [`ProbeError`] if it is missing, if the driver is not loaded, or if it is too old.
pub(crate) fn open(library: &Path) -> Result<Nvml, ProbeError> {
    let path: &OsStr = library.as_os_str();
    let nvml = Nvml::builder().lib_path(path).init().map_err(|error| match error {
        NvmlError::LibloadingError(cause) => missing(library, cause.to_string()),
        NvmlError::LibraryNotFound => missing(library, error.to_string()),
        error => library_error("start", &error),
    })?;
    if nvml.lib().nvmlShutdown.is_err() {
        // The wrapper calls it when dropped, and panics if it does not exist.
        std::mem::forget(nvml);
        return Err(ProbeError::DriverTooOld { cause: "nvmlShutdown".to_owned() });
    }
    Ok(nvml)
}

fn missing(library: &Path, cause: String) -> ProbeError {
    ProbeError::LibraryMissing { library: library.to_owned(), cause }
}
