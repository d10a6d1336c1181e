//! What every body begins with: `apiVersion` and `kind`, as in Kubernetes.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The version of every body.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum ApiVersion {
    /// The only one so far.
    #[default]
    #[serde(rename = "gpupack.dev/v1alpha1")]
    V1Alpha1,
}

/// Declares the types of `kind`. Each has one value, so a body of another kind cannot be read.
macro_rules! kinds {
    ($($name:ident: $value:ident),* $(,)?) => {$(
        #[doc = concat!("The `kind` of a body: `", stringify!($value), "`.")]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
        pub enum $name {
            #[doc = concat!("Always `", stringify!($value), "`.")]
            #[default]
            $value,
        }
    )*};
}

kinds! {
    ErrorKind: Error,
    LogLevelKind: LogLevel,
    ReportKind: Report,
    ReplyKind: Reply,
    LibraryAnswerKind: LibraryAnswer,
    StateKind: State,
    WaitingPodListKind: WaitingPodList,
    ExplanationKind: Explanation,
    MoveProposalsKind: MoveProposals,
    AdviceKind: Advice,
    FitKind: Fit,
    FragmentationKind: Fragmentation,
    SearchResultsKind: SearchResults,
    SummaryKind: Summary,
    SummaryDeltaKind: SummaryDelta,
    NodeListKind: NodeList,
    DeviceListKind: DeviceList,
    TenantListKind: TenantList,
    TeamListKind: TeamList,
    DemoSummaryKind: DemoSummary,
    DiagnosisKind: Diagnosis,
    SeenDevicesKind: SeenDevices,
    ClearRequestKind: ClearRequest,
    ClearedKind: Cleared,
}
