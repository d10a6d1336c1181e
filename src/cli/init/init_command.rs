//! `gpupack init`: asks a cluster, and prints values for the Helm chart.

use clap::Args;

use crate::base::connect;
use crate::base::connect::ApiServerArgs;
use crate::base::failure::Failure;
use crate::base::plain::print;
use crate::base::reader::Reader;
use crate::init::found_cluster::Cluster;
use crate::init::values::values;

/// Flags of `gpupack init`.
#[derive(Debug, Args)]
pub struct InitArgs {
    /// Address of the API server.
    #[command(flatten)]
    server: ApiServerArgs,
}

/// Runs `gpupack init`.
///
/// # Errors
/// The API server does not answer.
pub fn run(args: &InitArgs) -> Result<(), Failure> {
    connect::run(async {
        let reader = Reader::connected(&args.server).await?;
        print(&values(&Cluster::read(&reader).await));
        Ok(())
    })
}
