//! The pods of calls, as the watch shows them: only such pods get holds.

use control::shared::app::App;
use kube_api::pod::watch::Sink;
use kube_api::protocol::messages::ExtenderArgs;

/// The watch shows the pods of these calls.
pub(crate) fn show(app: &App, bodies: &[Vec<u8>]) {
    for body in bodies {
        let call = ExtenderArgs::parse(body).expect("a body as kube-scheduler sends it");
        app.pod(&call.pod);
    }
}
