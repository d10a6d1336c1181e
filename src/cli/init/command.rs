//! `gpupack init`: asks a cluster, and prints values for the Helm chart.

use clap::Args;

use crate::cli::base::connect;
use crate::cli::base::connect::ApiServerArgs;
use crate::cli::base::failure::Failure;
use crate::cli::base::plain::print;
use crate::cli::base::reader::Reader;
use crate::cli::init::facts::Cluster;
use crate::cli::init::values::values;

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
