//! `gpupack completion` and `gpupack man`: shell completions and manual pages, made from the flags.

use std::io;
use std::path::{Path, PathBuf};

use clap::{Args, Command};
use clap_complete::Shell;

use crate::base::failure::Failure;
use crate::base::plain::print;

/// Flags of `gpupack completion`.
#[derive(Debug, Args)]
pub struct CompletionArgs {
    /// The shell; save its output where that shell looks for completions
    #[arg(value_enum)]
    shell: Shell,
}

/// Flags of `gpupack man`.
#[derive(Debug, Args)]
pub struct ManArgs {
    /// Write a page for each command into this folder; without it the first page goes to stdout
    #[arg(long, value_name = "FOLDER")]
    dir: Option<PathBuf>,
}

/// Prints the completions of `command`.
pub fn completion(args: &CompletionArgs, mut command: Command) {
    let name = command.get_name().to_owned();
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, name, &mut script);
    print(&String::from_utf8_lossy(&script));
}

/// Prints the manual page of `command`, or writes those of all its commands.
///
/// # Errors
/// A file that cannot be written.
pub fn man(args: &ManArgs, command: Command) -> Result<(), Failure> {
    match &args.dir {
        Some(folder) => written(folder, command).map_err(|error| {
            Failure::other(format!("cannot write into {}: {error}", folder.display()))
        }),
        None => {
            let mut page = Vec::new();
            clap_mangen::Man::new(command).render(&mut page).map_err(Failure::other)?;
            print(&String::from_utf8_lossy(&page));
            Ok(())
        }
    }
}

fn written(folder: &Path, command: Command) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    clap_mangen::generate_to(command, folder)
}
