//! What a failed call of NVML means.

use nvml_wrapper::error::NvmlError;

use crate::gpu::sample::ProbeError;
use wire::api::condition::DeviceFault;

/// The meaning of a failed call.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// The driver does not report it; other answers are valid.
    Unsupported,
    /// This device cannot be used now.
    Device(DeviceFault),
    /// Nothing can be read until the library is opened again.
    Library(ProbeError),
}

/// The answer; `None` if the driver does not report it.
pub(crate) fn unless_unsupported<T>(answer: Result<T, NvmlError>) -> Result<Option<T>, Trouble> {
    match answer.map_err(trouble) {
        Ok(value) => Ok(Some(value)),
        Err(Trouble::Unsupported) => Ok(None),
        Err(other) => Err(other),
    }
}

/// The answer; `None` if a device that is there does not give it.
pub(crate) fn unless_lost<T>(answer: Result<T, NvmlError>) -> Result<Option<T>, Trouble> {
    match answer.map_err(trouble) {
        Ok(value) => Ok(Some(value)),
        Err(Trouble::Unsupported | Trouble::Device(DeviceFault::NotAnswering)) => Ok(None),
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

/// The meaning of an error.
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
        NvmlError::GpuLost => Trouble::Device(DeviceFault::Lost),
        NvmlError::ResetRequired => Trouble::Device(DeviceFault::ResetRequired),
        // Interrupt trouble, "unknown", and the errors of later drivers.
        _ => Trouble::Device(DeviceFault::NotAnswering),
    }
}

/// A failure of the library's start or of its count of GPUs. These calls alone show that the container itself is the
/// fault: a single device may refuse anything.
pub(crate) fn start_error(what: &'static str, error: &NvmlError) -> ProbeError {
    match error {
        NvmlError::LibRmVersionMismatch => ProbeError::DriverMismatch,
        NvmlError::Unknown | NvmlError::NoPermission => {
            ProbeError::Refused { what, cause: error.to_string() }
        }
        other => library_error(what, other),
    }
}

/// A failure of the whole library, with what to do about it.
pub(crate) fn library_error(what: &'static str, error: &NvmlError) -> ProbeError {
    match error {
        NvmlError::DriverNotLoaded => ProbeError::DriverNotLoaded,
        NvmlError::FailedToLoadSymbol(cause) => ProbeError::DriverTooOld { cause: cause.clone() },
        other => ProbeError::Driver { what, cause: other.to_string() },
    }
}
