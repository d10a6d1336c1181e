// What a whole cluster has beside the control plane: the real kube-controller-manager and kube-proxy,
// chosen by the name it is started under. It is a program of its own, so that the tests that need
// neither need not build it.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
)

func main() {
	switch name := filepath.Base(os.Args[0]); name {
	case "kube-controller-manager":
		os.Exit(cli.Run(controllers.NewControllerManagerCommand()))
	case "kube-proxy":
		os.Exit(cli.Run(proxy.NewProxyCommand()))
	default:
		fmt.Fprintf(os.Stderr, "started as `%s`: link this program to kube-controller-manager or kube-proxy\n", name)
		os.Exit(2)
	}
}
