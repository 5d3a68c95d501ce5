"""Model families: what a family of models brings to the engines that several families share."""
