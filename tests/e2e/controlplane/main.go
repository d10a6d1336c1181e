// The real control plane in one program: etcd, kube-apiserver and kube-scheduler, chosen by the
// name it is started under, as busybox does. It is test equipment, not part of the product: the
// end-to-end tests build it once, keep it outside the repository and start it under its three names.
//
// One program instead of three because the three share most of their packages: it links once and
// takes a third of the disk.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
)

func main() {
	name := strings.TrimSuffix(filepath.Base(os.Args[0]), ".exe")
	switch name {
	case "etcd":
		etcdmain.Main(os.Args)
	case "kube-apiserver":
		os.Exit(cli.Run(apiserver.NewAPIServerCommand()))
	case "kube-scheduler":
		os.Exit(cli.Run(scheduler.NewSchedulerCommand()))
	default:
		fmt.Fprintf(os.Stderr, "started as `%s`: link this program to etcd, kube-apiserver or kube-scheduler\n", name)
		os.Exit(2)
	}
}
