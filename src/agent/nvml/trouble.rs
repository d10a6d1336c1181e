//! How a failed call of NVML is to be taken.

use nvml_wrapper::error::NvmlError;

use crate::agent::gpu::probe::ProbeError;
use crate::report::condition::Ailment;

/// How a failed call is to be taken.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// The driver cannot say; the rest can be believed.
    Unsupported,
    /// This device cannot be used now.
    Device(Ailment),
    /// Nothing can be read until the library is opened anew.
    Library(ProbeError),
}

/// The answer, or none where the driver cannot say.
pub(crate) fn unless_unsupported<T>(answer: Result<T, NvmlError>) -> Result<Option<T>, Trouble> {
    match answer.map_err(trouble) {
        Ok(value) => Ok(Some(value)),
        Err(Trouble::Unsupported) => Ok(None),
        Err(other) => Err(other),
    }
}

/// The answer, or none where it cannot be had from a device that is there.
pub(crate) fn unless_lost<T>(answer: Result<T, NvmlError>) -> Result<Option<T>, Trouble> {
    match answer.map_err(trouble) {
        Ok(value) => Ok(Some(value)),
        Err(Trouble::Unsupported | Trouble::Device(Ailment::NotAnswering)) => Ok(None),
        Err(other) => Err(other),
    }
}

/// The answer of a call without which no device can be reported.
pub(crate) fn required<T>(answer: Result<T, NvmlError>) -> Result<T, Trouble> {
    answer.map_err(|error| match error {
        NvmlError::FailedToLoadSymbol(cause) => {
            Trouble::Library(ProbeError::DriverTooOld { cause })
        }
        other => trouble(other),
    })
}

/// How a failed call is to be taken.
fn trouble(error: NvmlError) -> Trouble {
    match error {
        NvmlError::NotSupported
        | NvmlError::NoPermission
        | NvmlError::NoData
        | NvmlError::FunctionNotFound
        | NvmlError::FailedToLoadSymbol(_)
        // Argument of an unknown version; deprecated.
        | NvmlError::UnexpectedVariant(25 | 26) => Trouble::Unsupported,
        NvmlError::Uninitialized
        | NvmlError::DriverNotLoaded
        | NvmlError::LibRmVersionMismatch
        | NvmlError::LibraryNotFound => Trouble::Library(library_error("read the GPUs", &error)),
        NvmlError::GpuLost => Trouble::Device(Ailment::Lost),
        NvmlError::ResetRequired => Trouble::Device(Ailment::ResetRequired),
        // Interrupt trouble, "unknown", and whatever a later driver invents.
        _ => Trouble::Device(Ailment::NotAnswering),
    }
}

/// A failure of the whole library, with its mend.
pub(crate) fn library_error(what: &'static str, error: &NvmlError) -> ProbeError {
    match error {
        NvmlError::DriverNotLoaded => ProbeError::DriverNotLoaded,
        NvmlError::LibRmVersionMismatch => ProbeError::DriverMismatch,
        NvmlError::FailedToLoadSymbol(cause) => ProbeError::DriverTooOld { cause: cause.clone() },
        other => ProbeError::Driver { what, cause: other.to_string() },
    }
}
