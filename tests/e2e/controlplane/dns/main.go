// The real CoreDNS with the plugins that answer for a cluster, for the test that installs gpupack as
// its documentation says.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
)

func main() {
	// The order in which plugins see a question.
	dnsserver.Directives = []string{"errors", "kubernetes"}
	coremain.Run()
}
